"""The live page of a running server, the events that feed it, and the comparison of storages.

page_snapshot.py       copies the engine's state between two steps, and makes the page's data of it
prefix_summary.py      the prefix tree as some rows
evictions.py           recent evictions as some rows
snapshot_feed.py       one snapshot for all watchers, as often as its cost allows
details.py             one block, one sequence
routes.py              the page and its events over HTTP
comparison_sessions.py the comparison's sessions over HTTP
page/                  HTML, CSS and scripts as served; without a build step or files of other hosts
"""
