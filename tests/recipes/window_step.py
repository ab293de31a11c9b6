"""The recipe's smallest kind of layer: a window whose start moves in steps of 4 tokens."""

from quire.spec import KINDS

NAME, STEP = "window-step-4", 4
KINDS[NAME] = lambda size: (size, STEP)
