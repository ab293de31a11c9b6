"""Bodies of requests and answers, as OpenAI's API has them; what is ours is said so in each field's description."""
