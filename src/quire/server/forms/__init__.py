"""The forms of answers: what a model's tokenizer and chat template mark in them, and what a request asks of them.

markers             added tokens by their ids
tools               how a template writes calls; named_form: those that are no JSON objects
reasoning           how it marks thoughts
answer_form         both of them, and an answer's text told apart by them; call_reader, named_call_reader: its calls
parameter_values    the JSON of an argument that a model writes as bare text
asked_form          the form that a request asks for, by whichever of many names
answer_grammar      the grammar of an answer that is forced to be a call, or of a schema behind thoughts
call_grammar        its rules of a call
token_bytes         the bytes that a token stands for
"""
