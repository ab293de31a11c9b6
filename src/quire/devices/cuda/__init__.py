"""Devices of torch: a card's memory, attention and linear layers. Experimental: no card has run them yet.

`quire.devices.device_of("@cuda:0")` is the entry point. Nothing here is imported before such a device is asked for.
"""
