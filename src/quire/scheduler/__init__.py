"""Requests and the batches made of them. No tensors.

Others may use
    scheduler                            chooses the batch of each step
    batches                              how a batch is built
    request, request_options             a request, and its options
    request_validator, prompts           the checks of a request, and the forms of a prompt
    tenants, tenant_quotas               tenants, and their quotas and floors
"""
