"""Quire's tiers under other engines.

Others may use
    vllm    the KV connector of a vLLM
"""
