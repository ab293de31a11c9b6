"""An agent loop: the model calls a tool, the result is appended, and the next turn reuses everything before it.

Look at the cached tokens: in a task each turn finds the turns before it, and the second task finds the instructions of
the first. A JSON schema makes every answer a valid call. FORCED names the tools of a turn, because the included model
was not trained for tools; with a model that was, set it to {}. Run: python examples/tool_agent.py [MODEL]
"""

import inspect
import json
import sys

from quire import LLM, SamplingParams

FILES = ["bisect.py", "heapq.py", "textwrap.py"]  # of the standard library
TOOLS = {  # name -> (function, schema of each argument)
    "list_files": (lambda: ", ".join(FILES), {}),
    "read_file": (lambda path: inspect.getsource(__import__(path[:-3]))[:400], {"path": {"enum": FILES}}),
    "answer": (lambda text: "done", {"text": {"type": "string", "maxLength": 60}}),
}
FORCED = {0: ["list_files"], 1: ["read_file"], 2: ["read_file"], 3: ["answer"]}
INSTRUCTIONS = "Answer with one tool call in JSON. The tools are:\n" + "\n".join(
    json.dumps({"tool": name, "arguments": arguments}) for name, (_, arguments) in TOOLS.items()
)


def call_schema(name):
    """The schema of a call of this tool, such as {"tool": "answer", "text": "..."}."""
    fields = {"tool": {"const": name}, **TOOLS[name][1]}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def run_task(llm, task, max_turns=6):
    """(prompt tokens, cached tokens, call) of each turn."""
    turns, messages = [], [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": task}]
    while len(turns) < max_turns and not (turns and turns[-1][2]["tool"] == "answer"):
        schema = {"anyOf": [call_schema(name) for name in FORCED.get(len(turns), TOOLS)]}
        params = SamplingParams(max_tokens=96, temperature=0, json_schema=schema)
        output = llm.generate(messages, params)[0]
        text = output.outputs[0].text
        call = json.loads(text)
        turns.append((len(output.prompt_token_ids), output.num_cached_tokens, call))
        print(f"  {turns[-1][1]:>4} of {turns[-1][0]:>4} prompt tokens cached: {text}")
        result = TOOLS[call["tool"]][0](**{name: call[name] for name in call if name != "tool"})
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"Result: {result}"}]
    return turns


def main(model=None):
    with LLM(model, kv_memory="64MiB") as llm:
        results = []
        for task in ("Which file sorts?", "Which file wraps lines?"):
            print(f"task: {task}")
            results.append(run_task(llm, task))
        return results


if __name__ == "__main__":
    main(*sys.argv[1:2])
