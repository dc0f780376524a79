"""Turn pickles into trees of numbers, texts and containers, without executing anything.

A value is a *node*: its kind, and what `_A` and `_B` say for the kind. The items of a container
are a chain of *links*: each has a node and the link after it. A dictionary's chain has keys and
values in turn. Opcodes that name or call anything are no part of it: they end the scan.

Values without content and numbers below 256 share nodes. Every other opcode makes at most one
node and one link, so that arrays as long as the text and the shared nodes suffice.
"""

import numpy as np

from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import address, load64, mix
from fastcomm_kernels.arrays import NONE, NULL, Bytes, Ints, Matrix

PickleTree = tuple[Ints, Ints, Ints]  # nodes, values, links
PickleFields = tuple[Bytes, Ints, int]  # names, their bounds, number of columns of numbers

NOTHING, TRUE, FALSE, INTEGER, FLOAT, TEXT, LIST, TUPLE, DICT = range(9)
# Problems: the text ends, an opcode is none of those that are read, the stack does not fit it.
WHOLE, CUT, FOREIGN, BROKEN = range(4)
# What a scan returns of itself.
STATUS, OFFSET, ROOT, NODES, STACKED, MARKS, LINKS = range(7)

# A number; begin and length of a text; first and last link of a container. Then a hash of the
# content: equal for equal numbers, texts, and lists or tuples of these, in any file. A
# dictionary has the number of its links in that place.
_A, _B, _H, _NUMBER = 0, 1, 2, 2
HASH = _H
# The opcodes that dumps need, by their names in `pickletools`.
_PROTO = 0x80
_FRAME = 0x95
_MARK = 0x28
_STOP = 0x2E
_EMPTY_DICT = 0x7D
_EMPTY_LIST = 0x5D
_EMPTY_TUPLE = 0x29
_SETITEMS = 0x75
_APPENDS = 0x65
_SETITEM = 0x73
_APPEND = 0x61
_TUPLE_ = 0x74
_TUPLE1 = 0x85
_TUPLE2 = 0x86
_TUPLE3 = 0x87
_LIST_ = 0x6C
_DICT_ = 0x64
_BINPUT = 0x71
_LONG_BINPUT = 0x72
_MEMOIZE = 0x94
_BINGET = 0x68
_LONG_BINGET = 0x6A
_BININT1 = 0x4B
_BININT2 = 0x4D
_BININT = 0x4A
_LONG1 = 0x8A
_BINFLOAT = 0x47
_BINUNICODE = 0x58
_SHORT_BINUNICODE = 0x8C
_NONE_ = 0x4E
_NEWTRUE = 0x88
_NEWFALSE = 0x89
# What an opcode does.
_REFUSED, _SKIPPED, _ENDS, _MARKS, _STORES, _GETS, _ADDS, _COLLECTS, _MAKES, _SHARES = range(10)
_DOES = np.zeros(256, np.int64)
_DOES[[_PROTO, _FRAME]] = _SKIPPED
_DOES[_STOP] = _ENDS
_DOES[_MARK] = _MARKS
_DOES[[_BINPUT, _LONG_BINPUT, _MEMOIZE]] = _STORES
_DOES[[_BINGET, _LONG_BINGET]] = _GETS
_DOES[[_SETITEMS, _APPENDS, _SETITEM, _APPEND]] = _ADDS  # to a container below
_DOES[[_TUPLE_, _TUPLE1, _TUPLE2, _TUPLE3, _LIST_, _DICT_]] = _COLLECTS  # into a new container
_DOES[[_EMPTY_DICT, _EMPTY_LIST, _EMPTY_TUPLE, _BININT, _BININT2, _LONG1]] = _MAKES
_DOES[[_NONE_, _NEWTRUE, _NEWFALSE, _BINFLOAT, _BININT1]] = _SHARES  # one node for all
_DOES[[_BINUNICODE, _SHORT_BINUNICODE]] = _MAKES
# The kind of what it makes, or adds to.
_KIND = np.zeros(256, np.int64)
_KIND[[_BININT, _BININT2, _LONG1]] = INTEGER
_KIND[[_BINUNICODE, _SHORT_BINUNICODE]] = TEXT
_KIND[[_EMPTY_LIST, _LIST_, _APPEND, _APPENDS]] = LIST
_KIND[[_EMPTY_TUPLE, _TUPLE_, _TUPLE1, _TUPLE2, _TUPLE3]] = TUPLE
_KIND[[_EMPTY_DICT, _DICT_, _SETITEM, _SETITEMS]] = DICT
# The node that it shares; of small numbers, that of 0.
_FLOAT, _SMALL = 3, 4
SHARED = _SMALL + 256
_SAME = np.zeros(256, np.int64)
_SAME[[_NONE_, _NEWTRUE, _NEWFALSE, _BINFLOAT, _BININT1]] = NOTHING, TRUE, FALSE, _FLOAT, _SMALL
# How many items it takes; 0 for all down to a mark.
_TAKES = np.zeros(256, np.int64)
_TAKES[[_SETITEM, _APPEND, _TUPLE1, _TUPLE2, _TUPLE3]] = 2, 1, 1, 2, 3
# Bytes of its operand, and of the length before it.
_BYTES = np.zeros(256, np.int64)
_BYTES[[_PROTO, _BINPUT, _BINGET, _BININT1, _BININT2]] = 1, 1, 1, 1, 2
_BYTES[[_LONG_BINPUT, _LONG_BINGET, _BININT, _BINFLOAT, _FRAME]] = 4, 4, 4, 8, 8
_LENGTH = np.zeros(256, np.int64)
_LENGTH[[_BINUNICODE, _LONG1, _SHORT_BINUNICODE]] = 4, 1, 1
_WIDEST = 8  # bytes of an integer, and of a step through a text
# FNV-1a with 63 bits for lists; an end tells the hash of a text from that of a list.
HASH_BEGIN, _HASH_FACTOR = 5472609002491880230, 1099511628211
LOW = (1 << 63) - 1
# Of counts of elements: two of these add up without an overflow, which LLVM takes for granted.
COUNTED = (1 << 62) - 1
END = 1 << 40
_TOP_BIT = 128


@kernel
def _unsigned(text: Bytes, at: int, size: int) -> int:
    """Return the little-endian number of `size` bytes at `at`."""
    value = 0
    for k in range(size):
        value |= int(text[at + k]) << (8 * k)
    return value


@kernel
def _signed(text: Bytes, at: int, size: int) -> int:
    """Return the same number, whose highest bit is its sign."""
    if size == _WIDEST:
        return load64(address(text), at)
    if size == 0:
        return 0
    value = int(text[at + size - 1])
    if value >= _TOP_BIT:
        value -= 2 * _TOP_BIT
    for k in range(size - 2, -1, -1):
        value = (value << 8) | int(text[at + k])
    return value


@kernel
def mixed(h: int, number: int) -> int:
    """Return a hash that a number has been added to; equal with and without the JIT."""
    return ((int(h) ^ (int(number) & LOW)) * _HASH_FACTOR) & LOW


@kernel
def _append(value: Ints, links: Ints, chain: int, item: int, count: int) -> int:
    """Append one node to the chain and hash of a list; return the number of links."""
    if value[chain, _A] == NONE:
        value[chain, _A] = count
    else:
        links[value[chain, _B], 1] = count
    links[count, 0], links[count, 1] = item, NONE
    value[chain, _B] = count
    value[chain, _H] = mixed(value[chain, _H], value[item, _H])
    return count + 1


@kernel
def _append_all(
    tree: PickleTree, chain: int, stack: Ints, low: int, high: int, count: int
) -> int:
    """Append stacked nodes to the chain of a container; return the number of links.

    They are added to the hash of lists and tuples, and to the number of a dictionary.
    """
    node, value, links = tree
    if low == high:
        return count
    if value[chain, _A] == NONE:
        value[chain, _A] = count
    else:
        links[value[chain, _B], 1] = count
    if node[chain] == DICT:
        value[chain, _NUMBER] += high - low
    else:
        h = value[chain, _H]
        for k in range(low, high):
            h = mixed(h, value[stack[k], _H])
        value[chain, _H] = h
    for k in range(low, high):
        links[count, 0], links[count, 1] = stack[k], count + 1
        count += 1
    links[count - 1, 1] = NONE
    value[chain, _B] = count - 1
    return count


@kernel
def _operand(text: Bytes, at: int, opcode: int) -> tuple[int, int]:
    """Return where the operand of an opcode begins whose length is at `at`, and the length.

    The second is -1 if the text ends before.
    """
    wide = _LENGTH[opcode]
    if len(text) - at < wide:
        return at, -1
    begin, size = at + wide, _unsigned(text, at, wide)
    return begin, size if size <= len(text) - begin else -1


@kernel
def _lowest(opcode: int, height: int, marks: Ints, marked: int) -> int:
    """Return where on the stack the items begin that an opcode takes; -1 if it may not."""
    if _TAKES[opcode] == 0:
        return marks[marked - 1] if marked else -1
    low = height - _TAKES[opcode]
    return low if low >= (marks[marked - 1] if marked else 0) else -1


@kernel
def _empty(node: Ints, value: Ints, item: int, kind: int) -> None:
    """Make a node an empty container."""
    node[item], value[item, _A], value[item, _B] = kind, NONE, NONE
    value[item, _H] = 0 if kind == DICT else HASH_BEGIN


@kernel
def hash_of_text(text: Bytes, begin: int, size: int) -> int:
    """Return the hash of `size` bytes of a text, taken eight at a time."""
    content, h, end = address(text), HASH_BEGIN, begin + size
    while end - begin >= _WIDEST:
        h = mix(h, load64(content, begin)) & LOW
        begin += _WIDEST
    for k in range(begin, end):
        h = mixed(h, int(text[k]))
    return mixed(h, END)


@kernel
def _share(node: Ints, value: Ints) -> None:
    """Write the nodes that all values without content, and small numbers, share."""
    node[:SHARED] = INTEGER
    node[NOTHING], node[TRUE], node[FALSE], node[_FLOAT] = NOTHING, TRUE, FALSE, FLOAT
    value[:_SMALL] = 0
    value[TRUE, _H] = 1
    for number in range(SHARED - _SMALL):
        value[_SMALL + number, _A] = number
        value[_SMALL + number, _B] = 0
        value[_SMALL + number, _H] = number


@kernel
def scan(
    text: Bytes, tree: PickleTree, stack: Ints, marks: Ints, memo: Ints
) -> tuple[int, int, int, int, int, int, int]:
    """Scan a pickle into nodes and links.

    Parameters
    ----------
    text
        The pickle.
    tree, stack, marks, memo
        Written. All arrays have at least `SHARED` elements more than the text has bytes; values
        have three columns, and links two.

    Returns
    -------
    tuple of int
        Status, offset of the problem, node of the whole value (NONE without one), number of
        nodes, height of the stack, numbers of marks and links.

    """
    node, value, links = tree
    _share(node, value)
    at, here, nodes, count, height, marked, stored, status = 0, 0, SHARED, 0, 0, 0, 0, CUT
    while at < len(text):
        opcode, here = int(text[at]), at
        # The next three are most of the opcodes of a dump, and take no further look.
        if opcode == _BINGET and len(text) - at > 1 and text[at + 1] < stored:
            stack[height] = memo[text[at + 1]]
            height, at = height + 1, at + 2
            continue
        if opcode == _BININT2 and len(text) - at > _BYTES[_BININT2]:
            number = int(text[at + 1]) | (int(text[at + 2]) << 8)
            node[nodes], value[nodes, _A], value[nodes, _H] = INTEGER, number, number
            stack[height] = nodes
            height, nodes, at = height + 1, nodes + 1, at + 3
            continue
        low = marks[marked - 1] if marked else 0
        if opcode == _APPEND and height - low > 1 and node[stack[height - 2]] == LIST:
            height, at = height - 1, at + 1
            count = _append(value, links, stack[height - 1], stack[height], count)
            continue
        does, begin, size = _DOES[opcode], at + 1, _BYTES[opcode]
        if _LENGTH[opcode]:
            begin, size = _operand(text, begin, opcode)
        elif size > len(text) - begin:
            size = -1
        if does == _REFUSED or size < 0:
            status = FOREIGN if does == _REFUSED else CUT
            break
        at = begin + size
        if does == _GETS:
            index = _unsigned(text, begin, size)
            if index >= stored:
                status = BROKEN
                break
            stack[height] = memo[index]
            height += 1
        elif does == _SHARES:
            stack[height] = _SAME[opcode] + (int(text[begin]) if size == 1 else 0)
            height += 1
        elif does == _MAKES:
            kind = _KIND[opcode]
            node[nodes] = kind
            if kind == INTEGER:
                number = _signed(text, begin, min(size, _WIDEST))
                value[nodes, _A], value[nodes, _H] = number, number
            elif kind == TEXT:
                h = hash_of_text(text, begin, size)
                value[nodes, _A], value[nodes, _B], value[nodes, _H] = begin, size, h
            else:
                _empty(node, value, nodes, kind)
            stack[height] = nodes
            height, nodes = height + 1, nodes + 1
            if kind == INTEGER and size > _WIDEST:
                status = BROKEN
                break
        elif does == _MARKS:
            marks[marked] = height
            marked += 1
        elif does == _STORES:
            index = stored if opcode == _MEMOIZE else _unsigned(text, begin, size)
            # Writers number what they store from 0, so that a larger number is none of theirs.
            if height == 0 or index > stored:
                status = BROKEN
                break
            stored += index == stored
            memo[index] = stack[height - 1]
        elif does == _ENDS:
            status = WHOLE if height == 1 and marked == 0 else BROKEN
            break
        elif does != _SKIPPED:
            low = _lowest(opcode, height, marks, marked)
            marked -= low >= 0 and _TAKES[opcode] == 0
            kind = _KIND[opcode]
            target = NONE
            if does == _COLLECTS and low >= 0:
                target = nodes
                _empty(node, value, target, kind)
                nodes += 1
            elif low >= 1 and (marked == 0 or low > marks[marked - 1]):
                target = stack[low - 1]
            is_uneven = kind == DICT and (height - low) % 2 != 0
            if target == NONE or node[target] != kind or is_uneven:
                status = BROKEN
                break
            count = _append_all(tree, target, stack, low, height, count)
            height = low
            if does == _COLLECTS:
                stack[height] = target
                height += 1
    root = stack[0] if status == WHOLE else NONE
    return status, here, root, nodes, height, marked, count


@kernel
def closed(
    tree: PickleTree, count: int, stack: Ints, height: int, marks: Ints, marked: int
) -> int:  # fmt: skip
    """Close the containers of a pickle that is cut, without the innermost dictionary.

    Parameters
    ----------
    tree, stack, marks
        As `scan` left them; written.
    count, height, marked
        Numbers of links that are free from here, of stacked nodes and of marks.

    Returns
    -------
    int
        The node of what is whole; NONE without any.

    """
    node = tree[0]
    for k in range(marked + 1):
        # Behind the last mark are the only key and content of a dictionary without a mark.
        low = marks[marked - 1 - k] if k < marked else 1
        if low < 1 or low > height:
            return NONE
        target = stack[low - 1]
        if k == 0 and node[target] == DICT and low > 1:
            height = low - 1
            continue
        many = height - low
        if node[target] == DICT:
            many -= many % 2
        elif node[target] != LIST:
            return NONE
        count = _append_all(tree, target, stack, low, low + many, count)
        height = low
    return stack[0] if height else NONE


@kernel
def length(tree: PickleTree, item: int) -> int:
    """Return the number of links of a container."""
    _, value, links = tree
    count, link = 0, value[item, _A]
    while link != NONE:
        count += 1
        link = links[link, 1]
    return count


@kernel
def hashes(tree: PickleTree, items: Matrix, out: Matrix) -> None:
    """Write the hash of each node of a matrix; NULL stays."""
    _, value, _ = tree
    for column in range(len(items)):
        for k in range(items.shape[1]):
            item = items[column, k]
            out[column, k] = NULL if item == NULL else value[item, _H]


@kernel
def elements(tree: PickleTree, items: Matrix, out: Matrix) -> None:
    """Write `elements_of` of each node of a matrix; NULL stays."""
    for column in range(len(items)):
        for k in range(items.shape[1]):
            item = items[column, k]
            out[column, k] = NULL if item == NULL else elements_of(tree, item)


@kernel
def elements_of(tree: PickleTree, item: int) -> int:
    """Return the elements of some shapes modulo 2^62: sums of products of integers."""
    node, value, links = tree
    elements = 0
    link = value[item, _A] if node[item] in (LIST, TUPLE) else NONE
    while link != NONE:
        inner = links[link, 0]
        if node[inner] in (LIST, TUPLE):
            product = 1
            at = value[inner, _A]
            while at != NONE:
                product = (product * int(value[links[at, 0], _A])) & COUNTED
                at = links[at, 1]
            elements = (elements + product) & COUNTED
        link = links[link, 1]
    return elements


@kernel
def _field_of(text: Bytes, value: Ints, key: int, names: Bytes, bounds: Ints) -> int:
    """Return the place of a key among names; their number for none of them."""
    size = value[key, _B]
    for place in range(len(bounds) - 1):
        begin = bounds[place]
        if bounds[place + 1] - begin == size:
            k = 0
            while k < size and text[value[key, _A] + k] == names[begin + k]:
                k += 1
            if k == size:
                return place
    return len(bounds) - 1


@kernel
def rows(
    text: Bytes, tree: PickleTree, chain: int, fields: PickleFields, place: Ints, out: Matrix
) -> int:
    """Write the dictionaries of a list into rows: a column each of the names.

    Parameters
    ----------
    text, tree
        A scanned pickle.
    chain
        The list.
    fields
        All names one after the other, where each begins (the last bound is the end), and how
        many of the first columns are numbers; the others are nodes.
    place
        Shape (nodes,), filled with NONE: written, the column of each key.
    out
        Shape (names, rows), filled with NULL; written: an integer, 0 and 1 for Booleans, or the
        node of a text or container. What is of another kind than its column stays.

    Returns
    -------
    int
        Number of rows; ``~row`` for the first that is no dictionary, or if the rows repeat more
        than the text can say.

    """
    node, value, links = tree
    names, bounds, numbers = fields
    row, steps, count = 0, 0, len(bounds) - 1
    link = value[chain, _A]
    while link != NONE:
        item = links[link, 0]
        if node[item] != DICT:
            return ~row
        at = value[item, _A]
        # The links of most are one behind the other, which is faster than to look them up.
        is_run = at != NONE and value[item, _B] - at + 1 == value[item, _NUMBER]
        end = value[item, _B] + 1 if is_run else NONE
        while at != end:
            steps += 1
            if steps > len(text):
                return ~row
            after = at + 1 if is_run else links[at, 1]
            key, content = links[at, 0], links[after, 0]
            at = after + 1 if is_run else links[after, 1]
            column = place[key]
            if column == NONE:
                column = count
                if node[key] == TEXT:
                    column = _field_of(text, value, key, names, bounds)
                place[key] = column
            kind = node[content]
            if column < numbers:
                if kind == INTEGER:
                    out[column, row] = value[content, _A]
                elif kind in (TRUE, FALSE):
                    out[column, row] = int(kind == TRUE)
            elif column < count and kind >= TEXT:
                out[column, row] = content
        row += 1
        link = links[link, 1]
    return row
