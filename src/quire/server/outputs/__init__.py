"""Output formats: the markers of a model's tokenizer and chat template, and the formats that requests ask for.

markers             added tokens by their ids
tool_call_format    the call format of a chat template; tagged_call_format: of calls that are not JSON objects
reasoning           the markers of reasoning
known_formats       call formats of model families; bare_calls: calls without markers; pythonic_calls: as Python
output_format       the formats of one answer, and the parser of its text
call_parser         parses calls, in several formats at once; object_calls, tagged_calls, ...: one format each
call_events         the parsers' events; growing_text: text that is still being generated
parameter_values    the JSON value of an argument that a model writes as bare text
requested_format    the output format of a request, by any of its many names
answer_grammar      the grammar of a forced call, or of a schema after reasoning
call_grammar        its rules of a call
token_bytes         the bytes of a token
"""
