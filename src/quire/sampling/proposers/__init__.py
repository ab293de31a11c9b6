"""Proposers of drafts: guesses of the tokens that come next, one file each.

proposer    the protocol, and the proposers by name
ngram       the text's own words
"""
