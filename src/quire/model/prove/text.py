"""The text whose activations a proof compares: some 600 tokens of plain English, code and numbers.

Not a benchmark: the model only has to compute with it as it does for its users.
"""

__all__ = ["TEXT"]

TEXT = """\
A quire is a gathering of leaves. In the days when books were copied by hand, four sheets of parchment were folded once
and laid into each other, and a scribe wrote on the sixteen pages that came of it before he reached for the next four.
Gatherings that were ready lay on a shelf until the binder sewed them together, and a catchword at the foot of the last
page told him which one came next. When a page was spoiled, only its gathering had to be written again; when two readers
wanted the same chapter on the same morning, the librarian could hand out one gathering to each of them, so long as
neither needed the other's. It is an old answer to a question that comes back whenever something is longer than the
place where it is kept: cut it into pieces of one size, number the pieces, and write down who has which.

Machines that write have the same trouble. For each word that a model has read, every one of its layers keeps a key and
a value, and each new word is compared with all the keys before it. After 2,048 words that may be 224 MiB; after 131,072
it is more than most machines have. Whoever sets aside room for the longest answer that anybody could ask for has set
aside nearly all of it for nothing, because the average answer is short: 61 % of the requests in one week had fewer than
300 words, 9 % had more than 2,000, and one had 48,913.

    def blocks_needed(num_tokens: int, block_size: int = 16) -> int:
        \"\"\"How many blocks hold so many tokens; the last one may be half empty.\"\"\"         if num_tokens < 0:
raise ValueError(f"expected at least 0 tokens, got {num_tokens}")         return (num_tokens + block_size - 1)
// block_size  "How many were there yesterday?" she asked. "Seventeen," he said, "and two of them came back."
The clerk turned a page, ran a finger down the column, and nodded. Seventeen it was: three from the harbour,
eleven from the mill, and three whose names nobody had written down. "Then we had better begin with those," she
said, and took her coat from the chair.

The capital of Portugal is Lisbon, that of Norway is Oslo, and that of Mongolia is Ulaanbaatar. Water boils at
100 degrees Celsius at sea level and at about 93 in Quito. The square root of 2 is 1.41421356, the fifth power
of 3 is 243, and no prime number above 3 can be divided by 6. Light needs 8 minutes and 19 seconds from the sun
to the earth; a letter from Vienna to Trieste needed four days in 1750 and one night in 1900.
"""
