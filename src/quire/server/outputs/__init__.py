"""The forms of answers: what a model's tokenizer and chat template mark in them, and what a request asks of them.

markers             added tokens by their ids
tools               how a template writes calls; named_form: those that are no JSON objects
reasoning           how it marks thoughts
known_forms         calls as families of models write them; bare_calls: without markers
answer_form         the forms of one answer, and its text told apart by them
call_reader         its calls, in several forms at once; object_calls, named_calls, bare_calls: one form each
call_events         what those find; growing_text: the text that they read as it comes
parameter_values    the JSON of an argument that a model writes as bare text
asked_form          the form that a request asks for, by whichever of many names
answer_grammar      the grammar of an answer that is forced to be a call, or of a schema behind thoughts
call_grammar        its rules of a call
token_bytes         the bytes that a token stands for
"""
