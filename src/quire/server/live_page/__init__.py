"""The live page of a running server, the events that feed it, and the comparison of storages.

page_snapshot.py       what is taken from the engine between two steps, and what is sent of it
prefix_summary.py      the prefix tree as some rows
evictions.py           what memory gave up lately, as some rows
snapshot_feed.py       one snapshot for all who watch, as often as its cost allows
details.py             one block, one sequence
routes.py              the page and its events over HTTP
comparison_sessions.py the comparison's sessions over HTTP
page/                  HTML, CSS and scripts as they are served; nothing is built, nothing comes from elsewhere
"""
