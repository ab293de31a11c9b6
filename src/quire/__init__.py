"""Quire: the memory system of LLM inference."""
