"""What a viewer draws of a Perfetto trace, by the public definitions of its packets."""

from collections import defaultdict

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

BEGIN, END, INSTANT = 1, 2, 3
INCREMENTAL = 64


def drawn(data):
    """Slices, instants with the arrows that begin there, and the descriptions of tracks.

    An end closes the innermost slice of its track. Events of one time are in the order of the
    file, whatever wrote them.
    """
    clocks, texts, tracks, events, zero = {}, {}, {}, [], None
    for packet in Trace.FromString(data).packet:
        own = packet.trusted_packet_sequence_id
        if packet.sequence_flags & 1:
            texts[own] = defaultdict(dict)
        for clock in packet.clock_snapshot.clocks:
            zero = clock.timestamp if zero is None else zero
            if clock.clock_id == INCREMENTAL:
                clocks[own] = clock.timestamp
        read_texts(packet.interned_data, texts.get(own))
        if packet.HasField("track_descriptor"):
            tracks[packet.track_descriptor.uuid] = packet.track_descriptor
        if packet.HasField("track_event"):
            clocks[own] += packet.timestamp
            events.append((clocks[own] - zero, texts[own], packet.track_event))
    return *paired(sorted(events, key=lambda event: event[0]), tracks), tracks


def read_texts(data, texts):
    for kind in ("event_categories", "event_names", "debug_annotation_names"):
        for entry in getattr(data, kind):
            texts[kind][entry.iid] = entry.name
    for entry in data.debug_annotation_string_values:
        texts["values"][entry.iid] = entry.str.decode()


def paired(events, tracks):
    running, slices, instants = defaultdict(list), [], []
    for time, texts, event in events:
        stack = running[event.track_uuid]
        if event.type == BEGIN:
            (category,) = event.category_iids
            stack.append(
                {
                    "pid": process_of(tracks, event.track_uuid).pid,
                    "thread": tracks[event.track_uuid].name,
                    "start": time,
                    "name": texts["event_names"][event.name_iid],
                    "cat": texts["event_categories"][category],
                    "args": dict(arg(texts, each) for each in event.debug_annotations),
                    "arrow": list(event.terminating_flow_ids),
                }
            )
        elif event.type == END:
            slices.append({**stack.pop(), "stop": time})
        else:
            assert event.type == INSTANT
            instants.append((time, stack[-1], list(event.flow_ids)))
    assert not any(running.values())
    return slices, instants


def arg(texts, own):
    """Key and value of an arg of an event."""
    name = texts["debug_annotation_names"][own.name_iid]
    if own.HasField("string_value_iid"):
        return name, texts["values"][own.string_value_iid]
    return name, own.int_value


def process_of(tracks, track):
    return tracks[tracks[track].parent_uuid].process
