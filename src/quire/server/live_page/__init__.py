"""The live page of a running server, and the events that feed it.

page_snapshot.py   copies the engine's state between two steps, and makes the page's data of it
prefix_summary.py  the prefix tree as some rows
evictions.py       recent evictions as some rows
snapshot_feed.py   one snapshot for all watchers, as often as its cost allows
details.py         one block, one sequence
routes.py          the page and its events over HTTP
page_files.py      a page's files and their headers
page/              HTML, CSS and scripts as served; without a build step or files of other hosts
"""
