"""The checksum of a trajectory's routes in Python's integers."""

WORD, PLACE, TOKEN = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def route_sum(rows, tokens):
    """Returns the checksum, int64, of rows: [n, L, K] of the first n tokens."""
    total = 0
    for place, row in enumerate(rows.tolist()):
        ids = [one for layer in row for one in layer]
        words = [ids[start : start + 4] for start in range(0, len(ids), 4)]
        packed = [sum((one % 2**16) << 16 * number for number, one in enumerate(word)) for word in words]
        polynomial = sum(word * pow(WORD, number, 2**64) for number, word in enumerate(packed, 1))
        total += polynomial * ((place * PLACE + int(tokens[place]) * TOKEN) | 1)
    return (total + 2**63) % 2**64 - 2**63
