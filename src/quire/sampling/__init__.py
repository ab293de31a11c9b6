"""From logits to text: parameters, sampler, grammar, detokenizer.

Others may use
    params        `SamplingParams`
    sampler       one token for each sequence
    beam_search   the rules of a beam search
    drafted       the tokens of sequences with drafts
    proposers.proposer   guesses of the tokens that come next
    scores, prompt_scores    log probabilities of a prompt's tokens
    greedy        the most likely token of each row
    grammar       tokens that a grammar allows
    token_mask    tokens that a request forbids
    model_rules   rules for tokens of the model's generation config
    detokenizer   text of tokens
"""
