"""Requests and the batches made of them. No tensors.

Others may use
    scheduler                            chooses the batch of each step
    batches                              builds a batch
    speculation, step_costs              chooses the drafts of a step; seconds of steps by their rows
    request, request_options             a request and its options
    request_validator, prompts           the checks of a request, the forms of a prompt
    known_texts                          the tokens of long texts
    tenants, tenant_quotas               tenants, their quotas and floors
"""
