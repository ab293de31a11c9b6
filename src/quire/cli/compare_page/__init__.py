"""The page of `quire compare --open`: the storages side by side, on this machine only.

comparison_app.py   the application and its server
index.html, compare.js, compare.css   the page; its other files are the live page's
"""
