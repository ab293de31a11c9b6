"""The prefix tree: a trie of blocks that maps content to blocks.

A node stands for 1 .. block_size tokens below its parent and names one block per column (`node_shape.py`; a column is a
group if all groups' blocks have equally many tokens), or a hole (-1) where that block is gone. The tree knows no
reference counts and no free list: `blocks.py` joins tree and pool.

Invariants
    T1  siblings are distinct and sorted by content (`elements.py`), so the sibling with the longest common
        prefix stands next to the insertion point, and all that start with X stand together behind X.
    T2  only full nodes (block_size tokens) have children; a shorter node, called partial, is a leaf.
    T3  no node is bare: without block, child and sequence. A root is dropped without child and sequence.

Cost: one step down is a binary search, O(log siblings) comparisons of one block (`num_visited` counts the nodes
compared); inserting moves the later siblings, a memmove of pointers.
"""

from __future__ import annotations

from quire.cache.manager.elements import num_common_elements

__all__ = ["HOLE", "Node", "PrefixTree"]

HOLE = -1


class Node:
    """One block of content; a root has none. Compared by identity."""

    __slots__ = ("block_ids", "children", "content", "depth", "id", "num_sequences", "num_tokens", "parent")

    def __init__(self, parent: Node | None, content: bytes, num_tokens: int, block_ids: list[int]) -> None:
        self.parent = parent
        self.content = content
        self.num_tokens = num_tokens
        self.block_ids = block_ids
        self.children: list[Node] = []
        # Open sequences whose full committed blocks end here.
        self.num_sequences = 0
        # Blocks from the root to here, this one included; 0 for a root, whose content is its namespace.
        self.depth: int = 0 if parent is None else parent.depth + 1
        # Never given to another node; -1 while nodes are not numbered.
        self.id = -1

    @property
    def root(self) -> Node:
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    @property
    def is_bare(self) -> bool:
        return (
            not self.children
            and not self.num_sequences
            and all(block_id == HOLE for block_id in self.block_ids)
        )


class PrefixTree:
    """One trie per namespace."""

    def __init__(self, block_size: int, column_starts: list[int]) -> None:
        self.block_size = block_size
        self.column_starts = column_starts
        self.roots: dict[bytes, Node] = {}
        self.num_nodes = 0
        self.num_visited = 0
        # Counts changes that can make a hit longer: nodes inserted or extended, holes filled.
        self.version = 0
        # The next node's id; None until `start_numbering`.
        self.next_id: int | None = None

    def root(self, namespace: bytes) -> Node:
        """The root of a namespace, made if there is none."""
        if namespace not in self.roots:
            self.roots[namespace] = Node(None, namespace, 0, [])
        return self.roots[namespace]

    # Look-ups

    def insertion_point(self, parent: Node, content: bytes) -> int:
        """Index of the first child whose content is >= `content`."""
        low, high = 0, len(parent.children)
        while low < high:
            middle = (low + high) // 2
            self.num_visited += 1
            if parent.children[middle].content < content:
                low = middle + 1
            else:
                high = middle
        return low

    def equal_child(self, parent: Node, content: bytes) -> Node | None:
        index = self.insertion_point(parent, content)
        if index < len(parent.children) and parent.children[index].content == content:
            return parent.children[index]
        return None

    def child_starting_with(self, parent: Node, content: bytes) -> Node | None:
        """The first child whose content begins with `content`, an equal one included."""
        index = self.insertion_point(parent, content)
        if index < len(parent.children) and parent.children[index].content.startswith(content):
            return parent.children[index]
        return None

    def closest_child(self, parent: Node, content: bytes) -> tuple[Node | None, int]:
        """The child with the longest common prefix with `content`, and its length in tokens.

        Of the two neighbours of the insertion point it is the right one, unless the left one is strictly closer.
        """
        index = self.insertion_point(parent, content)
        best, num_common = None, 0
        for child in parent.children[index : index + 1] + parent.children[max(0, index - 1) : index]:
            self.num_visited += 1
            common = num_common_elements(child.content, content)
            if common > num_common:
                best, num_common = child, common
        return best, num_common

    def closest_whole_child(self, parent: Node, content: bytes, most: int) -> tuple[Node | None, int, int]:
        """As `closest_child` among the children that have all blocks of the common part, and the number compared, at
        most `most`.

        The search goes from the insertion point outwards, to the right first: the common part only becomes shorter on
        each side.
        """
        index = self.insertion_point(parent, content)
        best, num_common, num_seen = None, 0, 0
        for side in (
            parent.children[index : index + most],
            parent.children[max(0, index - most) : index][::-1],
        ):
            for child in side:
                if num_seen == most:
                    break
                num_seen += 1
                self.num_visited += 1
                common = num_common_elements(child.content, content)
                if common <= num_common:
                    break
                if self.is_whole(child, common):
                    best, num_common = child, common
                    break
        return best, num_common, num_seen

    def is_whole(self, node: Node, num_tokens: int) -> bool:
        """Whether the node has all blocks of its first `num_tokens` tokens."""
        return all(
            block_id != HOLE or start >= num_tokens
            for block_id, start in zip(node.block_ids, self.column_starts, strict=True)
        )

    def nearest_child(self, parent: Node, content: bytes) -> tuple[Node | None, int]:
        """As `closest_child`, but a neighbour even if the common prefix is empty; None if there are no children."""
        node, num_common = self.closest_child(parent, content)
        if node is None and parent.children:
            node = parent.children[min(self.insertion_point(parent, content), len(parent.children) - 1)]
        return node, num_common

    def children_starting_with(self, parent: Node, content: bytes) -> list[Node]:
        """All children that start with `content`: they stand together."""
        first = last = self.insertion_point(parent, content)
        while last < len(parent.children) and parent.children[last].content.startswith(content):
            last += 1
        return parent.children[first:last]

    def all_nodes(self) -> list[Node]:
        """All nodes except roots; the children of all roots first, then those of the first node, and so on."""
        nodes = [node for name in sorted(self.roots) for node in self.roots[name].children]
        for node in nodes:
            nodes.extend(node.children)
        return nodes

    def is_prefix_of_sibling(self, node: Node) -> bool:
        """Whether a sibling begins with this node's content (it then stands right behind it)."""
        assert node.parent is not None
        siblings = node.parent.children
        index = self.insertion_point(node.parent, node.content) + 1
        return index < len(siblings) and siblings[index].content.startswith(node.content)

    def left_neighbour(self, node: Node) -> Node | None:
        assert node.parent is not None
        index = self.insertion_point(node.parent, node.content)
        return node.parent.children[index - 1] if index else None

    # Changing

    def start_numbering(self) -> None:
        """Nodes have ids from now on; present nodes get theirs in the order of `all_nodes`."""
        if self.next_id is None:
            self.next_id = 0
            for node in self.all_nodes():
                self._number(node)

    def _number(self, node: Node) -> None:
        if self.next_id is not None:
            node.id = self.next_id
            self.next_id += 1

    def insert(self, parent: Node, content: bytes, num_tokens: int, block_ids: list[int]) -> Node:
        """Adds a child. The parent must not have an equal one."""
        node = Node(parent, content, num_tokens, block_ids)
        parent.children.insert(self.insertion_point(parent, content), node)
        self._number(node)
        self.num_nodes += 1
        self.version += 1
        return node

    def extend(self, node: Node, content: bytes, num_tokens: int) -> None:
        """Give a partial node more tokens, which may move it among its siblings."""
        assert node.parent is not None
        siblings = node.parent.children
        siblings.pop(self.insertion_point(node.parent, node.content))
        node.content, node.num_tokens = content, num_tokens
        siblings.insert(self.insertion_point(node.parent, content), node)
        self.version += 1

    def prune(self, node: Node) -> None:
        """Drop the node if it is bare, then its parent if that is bare now, and so on."""
        while node.is_bare:
            parent = node.parent
            if parent is None:
                del self.roots[node.content]
                return
            parent.children.pop(self.insertion_point(parent, node.content))
            self.num_nodes -= 1
            node = parent
