"use strict";
// Timelines: all ranks of a step on a canvas. Times are ns from the begin of the step. Several
// timelines of a page show the same times.
const lengths = new Map(); // of the step that each timeline shows
const reach = () => Math.max(...lengths.values());

document.querySelectorAll("figure.timeline").forEach(async (figure, number) => {
  const find = (query) => figure.querySelector(query);
  const make = (tag, text = "") => Object.assign(document.createElement(tag), { textContent: text });
  const page = JSON.parse(find("script").textContent);
  const canvas = find(".rows canvas");
  const map = find(".map");
  const box = find(".rows");
  const spacer = find(".rows > div");
  const tip = find(".tip");
  const now = find(".now");
  if (typeof DecompressionStream === "undefined") {
    now.textContent = "This browser is too old for the timeline: it cannot decompress data.";
    return;
  }

  // Columns of whole numbers: least significant bytes of all rows first, from the least value on.
  async function unpacked({ rows, columns, data }) {
    const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    const raw = new Uint8Array(await new Response(stream).arrayBuffer());
    const found = { rows };
    let at = 0;
    for (const [name, width, least, isDelta] of columns) {
      const values = new Float64Array(rows);
      for (let byte = 0, unit = 1; byte < width; byte++, unit *= 256, at += rows) {
        for (let row = 0; row < rows; row++) values[row] += raw[at + row] * unit;
      }
      for (let row = 0, sum = 0; row < rows; row++) {
        values[row] += least;
        if (isDelta) values[row] = sum += values[row];
      }
      found[name] = values;
    }
    return found;
  }

  async function loaded(index) {
    const start = performance.now();
    const { events, instances, path, spans, bins, ...about } = page.steps[index];
    const step = { ...about };
    [step.events, step.instances, step.path, step.spans, step.bins] = await Promise.all(
      [events, instances, path, spans, bins].map(unpacked)
    );
    const { rank, kind } = step.events;
    step.lanes = new Map(page.ranks.map((each) => [each, [[], []]]));
    for (let row = 0; row < rank.length; row++) {
      step.lanes.get(rank[row])[kind[row] < FIRST_TAG ? 0 : 1].push(row);
    }
    performance.measure("timeline-decode", { start });
    return step;
  }

  // What is shown.
  const FIRST_TAG = 3;
  const NONE = -1;
  const AXIS = 22;
  const PAPER_WIDTH = 824;
  const detailed = new Set(page.detailed);
  const binned = new Map(page.ranks.filter((rank) => !detailed.has(rank)).map((rank, k) => [rank, k]));
  let step;
  let view = [0, 1];
  let cursor = NONE; // row of the event that is described
  let chosen = NONE; // instance whose members are marked
  let range = null; // selected times
  let pattern = null; // by name, whether the search has found it
  let width = 0;
  let height = 0;
  let colors = {};

  const lane = detailed.size > 16 ? 10 : 16;
  const gap = detailed.size > 16 ? 4 : 8;
  const thin = binned.size > 300 ? 2 : binned.size > 60 ? 6 : 16;
  const gutter = 66;
  const rows = [];
  let total = AXIS;
  // Among many, the ranks with events come first.
  const order = binned.size > 60 ? [...page.detailed, ...binned.keys()] : page.ranks;
  for (const rank of order) {
    const high = detailed.has(rank) ? 2 * lane + gap : thin;
    rows.push({ rank, y: total, high, isDetailed: detailed.has(rank) });
    total += high;
  }
  const rowOf = new Map(rows.map((row) => [row.rank, row]));

  function time(ns) {
    const [unit, name] = ns >= 1e9 ? [1e9, "s"] : ns >= 1e6 ? [1e6, "ms"] : ns >= 1e3 ? [1e3, "µs"] : [1, "ns"];
    const value = ns / unit;
    return `${unit === 1 ? value.toFixed(0) : value.toPrecision(value >= 100 ? 4 : 3)}\u202f${name}`;
  }

  function size(bytes) {
    const names = ["B", "kB", "MB", "GB", "TB", "PB"];
    let place = 0;
    for (; bytes >= 1000 && place < names.length - 1; place++) bytes /= 1000;
    return `${place ? bytes.toPrecision(3) : bytes}\u202f${names[place]}`;
  }

  const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
  const end = (row) => step.events.start[row] + step.events.duration[row];
  const x = (ns) => gutter + ((ns - view[0]) / (view[1] - view[0])) * (width - gutter);
  const ns = (px) => view[0] + ((px - gutter) / (width - gutter)) * (view[1] - view[0]);

  function described(row) {
    const { events, instances } = step;
    const [kind, count, bytes, bus] = ["kind", "count", "bytes", "bus_bytes"].map((key) => events[key][row]);
    const ms = events.duration[row];
    const name = page.names[events.name[row]];
    const what = kind < FIRST_TAG ? page.kinds[kind] : `${page.kinds[kind]} ${page.ops[events.op[row]]}`;
    const parts = [`rank ${events.rank[row]}`, `${what}: ${name}`, time(ms), `from ${time(events.start[row])}`];
    if (count > 1) {
      parts[1] = `${plural(count, what)} drawn as one, the longest is ${name}`;
      parts[2] = `${time(events.busy[row])} of ${time(ms)}`;
    }
    if (bytes >= 0) parts.push(size(bytes));
    if (bytes > 0 && ms > 0) parts.push(`algorithm bandwidth ${size((bytes / ms) * 1e9)}/s`);
    if (bus > 0 && ms > 0) parts.push(`bus bandwidth ${size((bus / ms) * 1e9)}/s`);
    if (events.wait[row] >= 0) parts.push(`waits ${time(Math.min(events.wait[row], ms))}`);
    const instance = events.instance[row];
    if (instance >= 0) {
      const last = instances.last_rank[instance];
      parts.push(`${plural(instances.members[instance], "rank")}, the last is ${last < 0 ? "unknown" : `rank ${last}`}`);
    }
    return parts;
  }

  // Drawing.
  function themed() {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    colors = Object.fromEntries(["ink", "muted", "line", "ground", "quiet", "accent", "warn", "pattern"].map((name) => [name, color(name)]));
    colors.kinds = page.looks.map((look) => color(`c-${look}`));
    colors.fills = page.patterns.map((lines, kind) => hatched(lines, colors.kinds[kind]));
  }

  function hatched(lines, color) {
    if (!lines) return color;
    const tile = Object.assign(document.createElement("canvas"), { width: 8, height: 8 });
    const pen = tile.getContext("2d");
    pen.fillStyle = color;
    pen.fillRect(0, 0, 8, 8);
    pen.strokeStyle = colors.pattern;
    pen.stroke(new Path2D(lines));
    return pen.createPattern(tile, "repeat");
  }

  const isDim = (row) =>
    (chosen !== NONE && step.events.instance[row] !== chosen) || (pattern && !pattern[step.events.name[row]]);

  function paintLane(pen, list, isComm, place, y, high, isFlat) {
    const { start, duration, kind, wait } = step.events;
    let edge = -1;
    let before = NONE;
    for (const row of list) {
      if (start[row] > view[1] || start[row] + duration[row] < view[0]) continue;
      const left = Math.max(place(start[row]), 0);
      const right = place(start[row] + duration[row]);
      const isTiny = right - left < 1;
      if (isTiny && before === kind[row] && left < edge && !pattern && chosen === NONE) continue;
      [edge, before] = [Math.max(right, left + 1), kind[row]];
      pen.globalAlpha = !isFlat && isDim(row) ? 0.15 : 1;
      pen.fillStyle = isFlat || right - left < 4 ? colors.kinds[kind[row]] : colors.fills[kind[row]];
      const isCopy = kind[row] === 1;
      pen.fillRect(left, isCopy ? y + high / 2 : y, Math.max(right - left, 0.8), isCopy ? high / 2 : high);
      if (!isComm || !(wait[row] > 0)) continue;
      const until = place(start[row] + Math.min(wait[row], duration[row]));
      pen.fillStyle = chosen !== NONE && !isDim(row) ? colors.warn : colors.ground;
      pen.globalAlpha *= 0.62;
      if (until - left > 0.5) pen.fillRect(left, y + 1, until - left, high - 2);
    }
    pen.globalAlpha = 1;
  }

  function paintBins(pen, rank, place, y, high) {
    const count = page.bins;
    const { cell } = step.bins;
    const first = binned.get(rank) * count;
    pen.fillStyle = colors.quiet;
    pen.fillRect(gutter, y, width - gutter, high);
    // Equal neighbors are one rectangle.
    for (let bin = 0, next = 1; bin < count; bin = next++) {
      while (next < count && cell[first + next] === cell[first + bin]) next++;
      const kind = Math.floor(cell[first + bin] / page.levels);
      const [left, right] = [place((bin / count) * step.length), place((next / count) * step.length)];
      if (kind === page.looks.length - 1 || right < 0 || left > width) continue;
      pen.fillStyle = colors.kinds[kind];
      pen.globalAlpha = 0.4 + (0.6 * (cell[first + bin] % page.levels)) / (page.levels - 1);
      pen.fillRect(left, y, right - left, high);
      pen.globalAlpha = 1;
    }
    pen.globalAlpha = 1;
  }

  function sized(target, wide, high) {
    const ratio = devicePixelRatio || 1;
    Object.assign(target, { width: Math.round(wide * ratio), height: Math.round(high * ratio) });
    Object.assign(target.style, { width: `${wide}px`, height: `${high}px` });
    const pen = target.getContext("2d");
    pen.scale(ratio, ratio);
    return pen;
  }

  function paintAxis(pen) {
    const wanted = (view[1] - view[0]) / Math.max(2, (width - gutter) / 90);
    const power = 10 ** Math.floor(Math.log10(wanted));
    const unit = power * [1, 2, 5, 10].find((times) => times * power >= wanted);
    pen.fillStyle = colors.ground;
    pen.fillRect(0, 0, width, AXIS);
    for (let tick = Math.ceil(view[0] / unit) * unit; tick <= view[1]; tick += unit) {
      pen.fillStyle = colors.line;
      pen.fillRect(x(tick), 14, 1, height);
      pen.fillStyle = colors.muted;
      const digits = Math.max(0, Math.ceil(-Math.log10(unit / 1e6)));
      pen.fillText(`${(tick / 1e6).toFixed(digits)} ms`, Math.min(x(tick) + 3, width - 52), 12);
    }
  }

  function outlined(pen, row, color, thick) {
    const place = rowOf.get(step.events.rank[row]);
    const isComm = step.events.kind[row] >= FIRST_TAG;
    const y = place.y - box.scrollTop + (isComm ? lane : 0) + gap / 2;
    const left = Math.max(x(step.events.start[row]), gutter);
    const wide = x(end(row)) - left;
    if (wide < 0 || left > width) return;
    pen.strokeStyle = color;
    pen.lineWidth = thick;
    pen.strokeRect(left, y, Math.max(wide, 2), lane);
    return [left, y];
  }

  function paintMarks(pen) {
    if (chosen !== NONE) {
      const last = step.instances.last_rank[chosen];
      for (let row = 0; row < step.events.rows; row++) {
        if (step.events.instance[row] !== chosen) continue;
        const isLast = step.events.rank[row] === last;
        const at = outlined(pen, row, isLast ? colors.warn : colors.ink, isLast ? 3 : 1);
        if (!at || !isLast) continue;
        pen.font = "bold 12px system-ui";
        pen.fillStyle = colors.warn;
        pen.fillText("last ▸", Math.max(at[0] - 38, gutter), at[1] + lane - 3);
      }
    }
    if (cursor !== NONE) outlined(pen, cursor, colors.accent, 2);
    if (range) {
      const [left, right] = range.map(x).sort((a, b) => a - b);
      pen.fillStyle = colors.accent;
      pen.globalAlpha = 0.14;
      pen.fillRect(Math.max(left, gutter), AXIS, right - Math.max(left, gutter), height);
      pen.globalAlpha = 1;
      pen.fillRect(left, AXIS, 1, height);
      pen.fillRect(right, AXIS, 1, height);
    }
  }

  function paintPath(pen) {
    const { path } = step;
    if (!path.rows || !find(".path input").checked) return;
    pen.strokeStyle = colors.ink;
    pen.lineWidth = 2;
    pen.beginPath();
    for (let edge = 0; edge < path.rows; edge++) {
      const [a, b] = [path.start[edge], path.start[edge] + path.duration[edge]];
      const row = rowOf.get(path.rank[edge]);
      if (b < view[0] || a > view[1]) continue;
      const kind = path.kind[edge];
      const half = row.isDetailed ? (kind === NONE ? lane : kind < FIRST_TAG ? lane / 2 : lane * 1.5) + gap / 2 : thin / 2;
      const y = row.y - box.scrollTop + half;
      // A vertical line to the next piece where the path changes rank or lane.
      pen.lineTo(Math.max(x(a), gutter), y);
      pen.lineTo(Math.max(x(b), gutter), y);
    }
    pen.stroke();
  }

  function paint() {
    const start = performance.now();
    width = document.documentElement.dataset.paper ? PAPER_WIDTH : box.clientWidth;
    height = Math.min(total, Math.max(240, innerHeight * 0.7));
    box.style.maxHeight = `${height + 2}px`; // with its border
    spacer.style.height = `${total}px`;
    const pen = sized(canvas, width, height);
    pen.font = "12px system-ui";
    for (const row of rows) {
      const y = row.y - box.scrollTop;
      if (y + row.high < AXIS || y > height) continue;
      if (row.isDetailed) {
        const [compute, comm] = step.lanes.get(row.rank);
        pen.fillStyle = colors.quiet;
        pen.fillRect(gutter, y + gap / 2, width - gutter, 2 * lane);
        pen.save();
        pen.beginPath();
        pen.rect(gutter, y, width - gutter, row.high);
        pen.clip();
        paintLane(pen, compute, false, x, y + gap / 2, lane - 1, false);
        paintLane(pen, comm, true, x, y + gap / 2 + lane, lane, false);
        pen.restore();
      } else {
        pen.save();
        pen.beginPath();
        pen.rect(gutter, y, width - gutter, row.high);
        pen.clip();
        paintBins(pen, row.rank, x, y, Math.max(row.high - (thin > 6 ? 2 : 0), 1));
        pen.restore();
      }
      if (!row.isDetailed && thin < 12) continue;
      pen.fillStyle = colors.muted;
      pen.fillText(`rank ${row.rank}`, 2, y + row.high / 2 + 4);
    }
    pen.save();
    pen.beginPath();
    pen.rect(gutter, AXIS, width - gutter, height);
    pen.clip();
    paintPath(pen);
    paintMarks(pen);
    pen.restore();
    paintAxis(pen);
    paintMap();
    const [from, to] = view.map((each) => (each / 1e6).toFixed(6));
    Object.assign(canvas.dataset, { from, to, step: step.number });
    const rank = cursor === NONE ? page.detailed[0] ?? page.ranks[0] : step.events.rank[cursor];
    find(".link").href = `#t=${((view[0] + view[1]) / 2e6).toFixed(6)}&d=${(to - from).toFixed(6)}&rank=${rank}&step=${step.number}`;
    performance.measure("timeline-draw", { start });
  }

  let whole; // the minimap without its window
  function paintMap() {
    const high = 40;
    const place = (each) => gutter + (each / step.length) * (width - gutter);
    const pen = sized(map, width, high);
    const key = [step.number, width, colors.ground].join();
    if (whole?.key !== key) {
      const shown = [view, chosen, pattern];
      [view, chosen, pattern] = [[0, step.length], NONE, null];
      pen.fillStyle = colors.quiet;
      pen.fillRect(gutter, 0, width - gutter, high);
      // Of more ranks than there are lines, some are left out.
      const lines = rows.filter((_, index) => index % Math.ceil(rows.length / (2 * high)) === 0);
      const each = high / lines.length;
      lines.forEach((row, index) => {
        if (!row.isDetailed) return paintBins(pen, row.rank, place, index * each, each);
        const [compute, comm] = step.lanes.get(row.rank);
        paintLane(pen, compute, false, place, index * each, each / 2, true);
        paintLane(pen, comm, false, place, index * each + each / 2, each / 2, true);
      });
      [view, chosen, pattern] = shown;
      whole = Object.assign(document.createElement("canvas"), { width: map.width, height: map.height, key });
      whole.getContext("2d").drawImage(map, 0, 0);
    } else {
      pen.drawImage(whole, 0, 0, width, high);
    }
    pen.fillStyle = colors.ground;
    pen.globalAlpha = 0.65;
    pen.fillRect(gutter, 0, place(view[0]) - gutter, high);
    pen.fillRect(place(view[1]), 0, width - place(view[1]), high);
    pen.globalAlpha = 1;
    pen.strokeStyle = colors.accent;
    pen.lineWidth = 2;
    pen.strokeRect(place(view[0]) + 1, 1, Math.max(place(view[1]) - place(view[0]) - 2, 2), high - 2);
  }

  let isWaiting = false;
  let summing;
  function redraw() {
    clearTimeout(summing);
    summing = setTimeout(sum, 150);
    if (isWaiting) return;
    isWaiting = true;
    requestAnimationFrame(() => {
      isWaiting = false;
      paint();
    });
  }

  // The selection, or else what is visible, as tables.
  function covered(spans) {
    let [sum, until] = [0, -Infinity];
    for (const [a, b] of spans.sort((one, other) => one[0] - other[0])) {
      sum += Math.max(0, b - Math.max(a, until));
      until = Math.max(until, b);
    }
    return sum;
  }

  function sum() {
    const [from, to] = range ? [...range].sort((a, b) => a - b) : view;
    const { events } = step;
    const sums = page.kinds.map(() => ({ count: 0, ns: 0, wait: 0 }));
    const inside = [];
    let busy = 0;
    for (const rank of page.detailed) {
      const spans = [];
      for (const row of step.lanes.get(rank)?.flat() ?? []) {
        const [a, b] = [Math.max(events.start[row], from), Math.min(end(row), to)];
        if (a > b || (a === b && events.duration[row] > 0)) continue;
        const each = sums[events.kind[row]];
        const share = events.duration[row] ? (b - a) / events.duration[row] : 1;
        each.count += events.count[row];
        each.ns += events.busy[row] * share;
        each.wait += Math.max(0, Math.min(events.start[row] + Math.max(events.wait[row], 0), b) - a);
        spans.push([a, b]);
        inside.push(row);
      }
      busy += covered(spans);
    }
    const whole = Math.max((to - from) * page.detailed.length, 1);
    const percent = (each) => `${((each / whole) * 100).toFixed(1)}\u202f%`;
    const lines = sums
      .map((each, kind) => [page.kinds[kind], each.count.toLocaleString("en"), time(each.ns), percent(each.ns), kind < FIRST_TAG ? "" : time(each.wait)])
      .filter((_, kind) => sums[kind].count);
    lines.push(["nothing runs", "", time(whole - busy), percent(whole - busy), ""]);
    fill(".kinds", lines);
    inside.sort((a, b) => events.duration[b] - events.duration[a]);
    const longest = inside.slice(0, 20).map((row) => [
      `rank ${events.rank[row]}`, page.names[events.name[row]], page.kinds[events.kind[row]],
      time(events.start[row]), time(events.duration[row]), events.wait[row] < 0 ? "" : time(events.wait[row]),
    ]);
    fill(".longest", longest);
    const count = sums.reduce((all, each) => all + each.count, 0);
    const text = `${range ? "Selection" : "View"}: ${time(to - from)} from ${time(from)}, `;
    const kinds = sums.map((each, kind) => (each.count ? `, ${page.kinds[kind]} ${time(each.ns)}` : "")).join("");
    find(".sum").setAttribute("aria-live", range ? "polite" : "off");
    find(".sum").textContent = `${text}${plural(count, "event")} of ${plural(page.detailed.length, "rank")}${kinds}, nothing runs ${time(whole - busy)}`;
  }

  function fill(query, lines) {
    const body = find(query).tBodies[0];
    body.replaceChildren(
      ...lines.map((cells) => {
        const line = make("tr");
        line.append(...cells.map((cell, place) => Object.assign(make(place ? "td" : "th", cell), place ? {} : { scope: "row" })));
        return line;
      })
    );
  }

  // Moves.
  function look(from, to) {
    const least = Math.min(100, reach());
    const wide = Math.min(Math.max(to - from, least), reach());
    const begin = Math.min(Math.max((from + to - wide) / 2, 0), reach() - wide);
    view = [begin, begin + wide];
    redraw();
    dispatchEvent(new CustomEvent("timeline-view", { detail: { from: figure, view } }));
  }

  const zoom = (factor, at = (view[0] + view[1]) / 2) => look(at - (at - view[0]) * factor, at + (view[1] - at) * factor);
  const pan = (share) => look(...view.map((each) => each + share * (view[1] - view[0])));

  function eventAt(px, py) {
    const y = py + box.scrollTop;
    const row = py < AXIS ? null : rows.find((each) => y >= each.y && y < each.y + each.high);
    if (!row) return {};
    if (!row.isDetailed || px < gutter) return { row };
    const number = y - row.y < gap / 2 + lane ? 0 : 1;
    const [a, b] = [ns(px - 2), ns(px + 2)];
    const hits = step.lanes.get(row.rank)[number].filter((each) => step.events.start[each] <= b && end(each) >= a);
    const exact = hits.filter((each) => step.events.start[each] <= ns(px) && end(each) >= ns(px));
    return { row, event: exact.at(-1) ?? hits[0] };
  }

  function say(parts) {
    now.textContent = parts.join(", ");
  }

  function pick(event) {
    cursor = event;
    if (event === NONE) return redraw();
    const { y, high } = rowOf.get(step.events.rank[event]);
    if (y - AXIS < box.scrollTop || y + high > box.scrollTop + height) box.scrollTop = y - height / 2;
    if (step.events.start[event] > view[1] || end(event) < view[0]) {
      const middle = step.events.start[event] + step.events.duration[event] / 2;
      const wide = Math.max(view[1] - view[0], 2 * step.events.duration[event]);
      look(middle - wide / 2, middle + wide / 2);
    }
    say(described(event));
    redraw();
  }

  function choose(event) {
    const instance = event === undefined || event === NONE ? NONE : step.events.instance[event];
    chosen = instance === chosen ? NONE : instance;
    if (event !== undefined && event !== NONE) pick(event);
    if (chosen !== NONE) {
      const members = step.events.instance.filter((each) => each === chosen).length;
      const waits = step.instances.waits[chosen];
      say([...described(event), `${members} of ${step.instances.members[chosen]} are marked`, `together they wait ${waits < 0 ? "n/a" : time(waits)}`]);
    }
    redraw();
  }

  // By keys: lanes up and down, events by N and P.
  function lanesInOrder() {
    return page.detailed.flatMap((rank) => step.lanes.get(rank) ?? []).filter((list) => list.length);
  }

  const byStart = (list) => [...list].sort((a, b) => step.events.start[a] - step.events.start[b]);

  function moveLane(by) {
    const lanes = lanesInOrder();
    const at = lanes.findIndex((list) => list.includes(cursor));
    const middle = cursor === NONE ? (view[0] + view[1]) / 2 : step.events.start[cursor];
    const list = lanes[Math.min(Math.max(at < 0 ? 0 : at + by, 0), lanes.length - 1)];
    const away = (row) => Math.abs(step.events.start[row] - middle);
    if (list) pick(list.reduce((best, row) => (away(row) < away(best) ? row : best)));
  }

  function moveEvent(by) {
    const list = lanesInOrder().find((each) => each.includes(cursor));
    if (!list) return moveLane(0);
    const sorted = byStart(list);
    pick(sorted[Math.min(Math.max(sorted.indexOf(cursor) + by, 0), sorted.length - 1)]);
  }

  function select(from, to) {
    range = from === null ? null : [from, to];
    redraw();
  }

  const KEYS = {
    w: () => zoom(0.7), s: () => zoom(1 / 0.7), "+": () => zoom(0.7), "-": () => zoom(1 / 0.7),
    a: () => pan(-0.2), d: () => pan(0.2), arrowleft: () => pan(-0.2), arrowright: () => pan(0.2),
    arrowup: () => moveLane(-1), arrowdown: () => moveLane(1), n: () => moveEvent(1), p: () => moveEvent(-1),
    enter: () => choose(cursor), " ": () => choose(cursor), m: () => select(...view),
    home: () => look(0, reach()), 0: () => look(0, reach()),
    escape: () => {
      [chosen, cursor] = [NONE, NONE];
      select(null);
    },
  };
  canvas.addEventListener("keydown", (event) => {
    const act = KEYS[event.key.toLowerCase()];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });

  // A wheel that already scrolls the page goes on doing so; at the whole step it scrolls on.
  let scrolled = 0;
  addEventListener("scroll", () => (scrolled = performance.now()), { capture: true, passive: true });
  canvas.addEventListener("wheel", (event) => {
    const isWhole = view[1] - view[0] >= reach();
    if (!event.ctrlKey && (performance.now() - scrolled < 250 || (isWhole && event.deltaY > 0))) return;
    event.preventDefault();
    const spot = ns(event.clientX - canvas.getBoundingClientRect().left);
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) pan((event.deltaX || event.deltaY) / 800);
    else zoom(2 ** (Math.sign(event.deltaY) * Math.min(Math.abs(event.deltaY) / 250, 1)), spot);
  }, { passive: false });

  const pointers = new Map();
  let dragged = null;
  const isSelecting = (event) => event.shiftKey || find(".select").getAttribute("aria-pressed") === "true";
  const spotOf = (event) => {
    const { left, top } = canvas.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    const [px, py] = spotOf(event);
    pointers.set(event.pointerId, px);
    dragged = { px, py, view: [...view], scroll: box.scrollTop, selects: isSelecting(event), moved: false, pinch: [...pointers.values()] };
  });
  canvas.addEventListener("pointermove", (event) => {
    const [px, py] = spotOf(event);
    if (!pointers.has(event.pointerId)) return hover(px, py, event);
    pointers.set(event.pointerId, px);
    const wide = dragged.view[1] - dragged.view[0];
    const at = (pixel) => dragged.view[0] + ((pixel - gutter) / (width - gutter)) * wide;
    if (pointers.size === 2) {
      const [a, b] = [...pointers.values()];
      const factor = Math.abs(dragged.pinch[0] - dragged.pinch[1]) / Math.max(Math.abs(a - b), 8);
      const middle = at((dragged.pinch[0] + dragged.pinch[1]) / 2);
      const place = ((a + b) / 2 - gutter) / (width - gutter);
      dragged.moved = true;
      return look(middle - place * wide * factor, middle + (1 - place) * wide * factor);
    }
    dragged.moved ||= Math.hypot(px - dragged.px, py - dragged.py) > 4;
    if (!dragged.moved) return;
    tip.hidden = true;
    if (dragged.selects) return select(at(dragged.px), at(Math.max(px, gutter)));
    const shift = ((dragged.px - px) / (width - gutter)) * wide;
    if (event.pointerType === "mouse") box.scrollTop = dragged.scroll + dragged.py - py;
    look(dragged.view[0] + shift, dragged.view[1] + shift);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, (event) => {
      const isClick = name === "pointerup" && dragged && !dragged.moved;
      pointers.delete(event.pointerId);
      if (!isClick) return;
      const { event: hit } = eventAt(...spotOf(event));
      if (hit === undefined) {
        cursor = NONE;
        chosen = NONE;
        select(null);
      } else choose(hit);
    });
  }
  canvas.addEventListener("pointerleave", () => (tip.hidden = true));

  function hover(px, py, event) {
    const { row, event: hit } = eventAt(px, py);
    tip.hidden = !row || (hit === undefined && row.isDetailed);
    if (tip.hidden) return;
    const [head, ...parts] = hit === undefined ? occupied(row.rank, ns(px)) : described(hit);
    tip.replaceChildren(make("b", head), ...parts.map((part) => make("span", part)));
    const { width: wide, height: high } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, innerWidth - wide - 8))}px`;
    tip.style.top = `${event.clientY + 18 + high > innerHeight ? event.clientY - high - 12 : event.clientY + 18}px`;
  }

  function occupied(rank, at) {
    const bin = Math.min(Math.max(Math.floor((at / step.length) * page.bins), 0), page.bins - 1);
    const cell = step.bins.cell[binned.get(rank) * page.bins + bin];
    const [kind, level] = [Math.floor(cell / page.levels), cell % page.levels];
    const share = `${((level / page.levels) * 100).toFixed(0)} to ${(((level + 1) / page.levels) * 100).toFixed(0)}\u202f%`;
    return [`rank ${rank}`, `${page.bin_kinds[kind]} takes most of these ${time(step.length / page.bins)}: ${share}`];
  }

  // The minimap, buttons, search and steps.
  let isMapped = false;
  const mapTo = (event) => {
    const at = ((event.clientX - map.getBoundingClientRect().left - gutter) / (width - gutter)) * step.length;
    const half = (view[1] - view[0]) / 2;
    look(at - half, at + half);
  };
  map.addEventListener("pointerdown", (event) => {
    map.setPointerCapture(event.pointerId);
    isMapped = true;
    mapTo(event);
  });
  map.addEventListener("pointermove", (event) => isMapped && mapTo(event));
  map.addEventListener("pointerup", () => (isMapped = false));
  box.addEventListener("scroll", redraw, { passive: true });
  find(".in").addEventListener("click", () => zoom(0.5));
  find(".out").addEventListener("click", () => zoom(2));
  find(".all").addEventListener("click", () => look(0, reach()));
  find(".select").addEventListener("click", ({ currentTarget: button }) =>
    button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"))
  );
  find(".path input").addEventListener("change", redraw);

  const search = find("input[type=search]");
  const found = () => [...step.events.name.keys()].filter((row) => pattern[step.events.name[row]]);
  search.addEventListener("input", () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    pattern = words.length ? page.names.map((name) => words.every((word) => name.toLowerCase().includes(word))) : null;
    if (pattern) {
      const hits = found();
      const ms = hits.reduce((all, row) => all + step.events.busy[row], 0);
      const count = hits.reduce((all, row) => all + step.events.count[row], 0);
      say([`${plural(count, "event")} found`, `${time(ms)} together`, "Enter goes to the next"]);
    } else say([]);
    redraw();
  });
  search.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !pattern) return;
    const hits = byStart(found());
    const place = hits.indexOf(cursor);
    if (hits.length) pick(hits[(place + (event.shiftKey ? hits.length - 1 : 1)) % hits.length]);
  });

  async function show(index) {
    const input = figure.querySelectorAll(".views input")[index];
    if (input) input.checked = true;
    step = await loaded(index);
    lengths.set(figure, step.length);
    [cursor, chosen, range] = [NONE, NONE, null];
    find(".path").hidden = !step.path.rows;
    look(0, reach());
  }
  figure.querySelectorAll(".views input").forEach((input, index) =>
    input.addEventListener("change", async () => {
      await show(index);
    })
  );

  // A moment: #t=MS&d=MS&rank=NUMBER&step=NUMBER. d is shown around t; all but t may be left out.
  async function follow() {
    const words = new URLSearchParams(location.hash.slice(1));
    const number = (key) => (words.get(key)?.trim() ? Number(words.get(key)) : NaN);
    if (!(number("t") >= 0)) return;
    const index = page.steps.findIndex((each) => each.number === number("step"));
    if (index >= 0 && page.steps[index].number !== step.number) await show(index);
    const at = number("t") * 1e6;
    const wide = number("d") > 0 ? number("d") * 1e6 : step.length / 20;
    look(at - wide / 2, at + wide / 2);
    const rank = rowOf.get(number("rank"));
    if (rank) box.scrollTop = rank.y - height / 2;
    const [compute, comm] = step.lanes.get(number("rank")) ?? [[], []];
    const hit = [...comm, ...compute].find((row) => step.events.start[row] <= at && end(row) >= at);
    [cursor, chosen] = [NONE, NONE];
    if (hit !== undefined) choose(hit);
    else if (rank) say([`rank ${rank.rank}`, `at ${time(at)}`]);
    figure.scrollIntoView({ block: "start" });
    canvas.focus({ preventScroll: true });
  }

  const anew = () => {
    themed();
    paint();
  };
  addEventListener("timeline-view", ({ detail }) => {
    if (detail.from === figure || !step) return;
    view = detail.view;
    redraw();
  });
  await show(0);
  anew();
  sum();
  // Links to a moment are of the first timeline.
  if (number === 0) {
    await follow();
    addEventListener("hashchange", follow);
    // A link that was followed before changes nothing in the address.
    document.addEventListener("click", ({ target }) => {
      const link = target.closest('a[href^="#t="]');
      if (link && link.hash === location.hash) follow();
    });
  }
  figure.dataset.drawn = "1";
  addEventListener("resize", redraw);
  addEventListener("beforeprint", anew);
  addEventListener("afterprint", anew);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", anew);
});
