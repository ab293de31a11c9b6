"""Requests and the steps made of them. No tensors.

Others may use
    scheduler                            decides the steps
    request, request_options             what is asked for, and how
    request_validator, prompts           what may be asked, and what a prompt may be
    tenants, fair_share                  whose requests, and whose turn
"""
