"""How a sequence repeats itself, by trying every period and every run."""


def repeats(token, shortest):
    """Period, begin and end of the longest run of places that equal those a period before."""
    best = (0, 0, 0)
    longest = shortest
    for period in range(1, len(token) - shortest):
        runs = [
            (begin, end)
            for begin in range(period, len(token))
            for end in range(begin + 1, len(token) + 1)
            if all(token[k] == token[k - period] for k in range(begin, end))
        ]
        for begin, end in sorted(runs, key=lambda run: (run[1] - run[0], run[0])):
            if end - begin > longest or (best[0] == period and end - begin == longest):
                longest, best = end - begin, (period, begin, end)
    return best
