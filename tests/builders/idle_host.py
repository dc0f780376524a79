"""A host that launches work, with planted causes of idle time."""

from builders import kineto_text as k


class Host:
    """Writes the events of one thread and one stream, one after another; times in us."""

    def __init__(self):
        self.events, self.number, self.now, self.free = [], 0, 0, 0

    def launch(self, dur, after=0, pause=10):
        """Launch a kernel, which starts `after` us later than it could."""
        self.number += 1
        self.events.append(k.launch(self.now, self.number, 5))
        start = max(self.now + 8, self.free + after)
        self.events.append(k.kernel("gemm", start, dur, correlation=self.number))
        self.free, self.now = start + dur, self.now + 5 + pause

    def does(self, name, cat, dur):
        self.events.append(k.event(name, cat, self.now, dur, pid=100, tid=1))
        self.now += dur

    def synchronizes(self):
        begun = self.now
        stop = max(self.free, self.now) + 60
        for name, cat, edge in (
            ("aten::item", "cpu_op", 5),
            ("cudaStreamSynchronize", "cuda_runtime", 0),
        ):
            first = begun - edge
            self.events.append(k.event(name, cat, first, stop + edge - first, pid=100, tid=1))
        self.now = stop + 15


def faulty(fault):
    """Two steps of a job with a fault, and the idle us that it plants."""
    host, planted = Host(), 0
    for step in range(2):
        begun = host.now
        for number in range(40):
            if fault == "launch_bound":
                host.launch(20, pause=70)
                planted += 55 if number else 0
            elif fault == "kernel_gaps":
                host.launch(60, after=40)
                planted += 40 if number or step else 0
            else:
                host.launch(100)
            if fault == "synchronization" and number % 8 == 7:
                host.synchronizes()
                planted += 75 + 8
        if fault == "data_loading":
            host.now = host.free
            host.does("enumerate(DataLoader)#_Iter.__next__", "user_annotation", 3000)
            planted += 3000
        host.events.append(k.mark(f"ProfilerStep#{step}", begun, host.now - begun))
    return host.events, planted
