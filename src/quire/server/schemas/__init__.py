"""Bodies of requests and answers, as in OpenAI's API; descriptions mark the fields that are Quire's own."""
