"""A chat whose history grows: each turn sends the whole conversation, and computes only its new end.

Look at the column "cached": it rises with the history, while "computed" stays about as long as one message. The time to
the first token falls after the first turn, although the prompt becomes longer. The included model completes Python and
answers no questions; give a model to read sense. Run: python examples/chat.py [MODEL]
"""

import sys

from quire import LLM, SamplingParams

INSTRUCTIONS = "You help with Python. Answer in one short function, and say in one line what it does. " * 12
QUESTIONS = (
    "How do I add two numbers?",
    "And how do I multiply them?",
    "Write a test for both.",
    "Now without the words in English.",
    "Which of these functions was the first one?",
)


def main(model=None):
    """(prompt tokens, cached tokens) of each turn."""
    turns = []
    history = [{"role": "system", "content": INSTRUCTIONS}]
    print(f"{'turn':>4} {'prompt':>7} {'cached':>7} {'computed':>9} {'first token':>12}   answer")
    with LLM(model, kv_memory="64MiB") as llm:
        for turn, question in enumerate(QUESTIONS, 1):
            history.append({"role": "user", "content": question})
            output = llm.generate(history, SamplingParams(max_tokens=48, temperature=0.7, seed=turn))[0]
            answer = output.outputs[0].text
            history.append({"role": "assistant", "content": answer})
            prompt, cached = len(output.prompt_token_ids), output.num_cached_tokens
            milliseconds = 1000 * (output.timings.time_to_first_token_s or 0)
            print(
                f"{turn:>4} {prompt:>7} {cached:>7} {prompt - cached:>9} {milliseconds:>9.1f} ms   {answer[:32]!r}"
            )
            turns.append((prompt, cached))
    return turns


if __name__ == "__main__":
    main(*sys.argv[1:2])
