"use strict";
(() => {
  const root = document.documentElement;
  const all = (query, from = document) => [...from.querySelectorAll(query)];
  const make = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
  const said = (name) => JSON.parse(document.getElementById("spec-" + name).textContent);

  // On paper everything is light.
  addEventListener("beforeprint", () => (root.dataset.paper = "1"));
  addEventListener("afterprint", () => delete root.dataset.paper);

  // Figures: one of several views, one of several lines.
  all(".views input").forEach((input) =>
    input.addEventListener("change", () =>
      all(".view", input.closest("figure")).forEach((view) => (view.hidden = view.dataset.view !== input.value))
    )
  );
  all(".lines button").forEach((button) =>
    button.addEventListener("click", () => {
      const chart = button.closest(".view");
      all(".lines button", chart).forEach((each) => each.setAttribute("aria-pressed", each === button));
      all(".series", chart).forEach((each) => each.classList.toggle("on", each.dataset.line === button.dataset.line));
    })
  );

  // Tables: sort by a head, filter by words.
  const key = (row, place) => row.cells[place].dataset.sort;

  function sort(table, head) {
    const place = head.cellIndex;
    const rows = [...table.tBodies[0].rows];
    const isNumber = head.classList.contains("right") ||
      rows.every((row) => key(row, place) !== undefined && key(row, place) !== "" && !isNaN(key(row, place)));
    const falls = head.ariaSort === "none" ? isNumber && place > 0 : head.ariaSort === "ascending";
    all("th[aria-sort]", table.tHead).forEach((each) => (each.ariaSort = "none"));
    head.ariaSort = falls ? "descending" : "ascending";
    rows.sort((a, b) => {
      const [x, y] = [key(a, place), key(b, place)];
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
      const order = isNumber ? x - y : x < y ? -1 : x > y ? 1 : 0;
      return falls ? -order : order;
    });
    table.tBodies[0].append(...rows);
  }

  for (const box of all(".table")) {
    const table = box.querySelector("table");
    all("thead button", table).forEach((button) =>
      button.addEventListener("click", () => sort(table, button.parentElement))
    );
    const input = box.querySelector(".filter input");
    if (!input) continue;
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/);
      const rows = [...table.tBodies[0].rows];
      rows.forEach((row) => {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      });
      const kept = rows.filter((row) => !row.hidden).length;
      box.querySelector("output").textContent = `${kept} of ${rows.length} rows`;
    });
  }

  // Definitions: one tip for all, shown on hover and on focus, hidden by Escape.
  const tip = document.getElementById("tip");
  let waiting;

  function meant(target) {
    const own = target.closest("[data-def], [data-why]");
    const cell = target.closest("td");
    if (own && own.dataset.def) return { key: own.dataset.def, why: own.dataset.why, at: own, slow: false };
    if (!cell) return null;
    const head = cell.closest("table").tHead.rows[0].cells[cell.cellIndex].firstElementChild;
    if (!head.dataset.def && !cell.dataset.why) return null;
    return { key: head.dataset.def, why: cell.dataset.why, at: cell, slow: true };
  }

  function show({ key, why, at }) {
    const entry = key && document.getElementById("def-" + key);
    const parts = [];
    if (entry) {
      parts.push(make("b", entry.querySelector("dt").textContent));
      entry.querySelector("dd").childNodes.forEach((node) => parts.push(node.cloneNode(true)));
    }
    if (why) parts.push(make("i", "Unknown here: " + why + "."));
    tip.replaceChildren(...parts);
    tip.hidden = false;
    place(at.getBoundingClientRect());
  }

  function place(spot) {
    const size = tip.getBoundingClientRect();
    const left = Math.max(8, Math.min(spot.left, innerWidth - size.width - 8));
    const above = spot.top - size.height - 8;
    const below = Math.min(spot.bottom + 8, innerHeight - size.height - 8);
    tip.style.left = left + "px";
    tip.style.top = (spot.bottom + 8 + size.height > innerHeight && above > 0 ? above : below) + "px";
  }

  function hide() {
    clearTimeout(waiting);
    tip.hidden = true;
  }

  // Charts: the text of a mark, or of a pixel of a heat map.
  const inflated = new Map();

  async function levels(image) {
    if (!inflated.has(image)) {
      const bytes = Uint8Array.from(atob(image.dataset.levels), (each) => each.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
      inflated.set(image, new Uint8Array(await new Response(stream).arrayBuffer()));
    }
    return inflated.get(image);
  }

  async function pixel(image, event) {
    const [wide, tall, low, high, most] = image.dataset.heat.split(" ").map(Number);
    const box = image.getBoundingClientRect();
    const at = (part, whole, count) => Math.max(0, Math.min(count - 1, Math.floor((part / whole) * count)));
    const across = at(event.clientX - box.left, box.width, wide);
    const down = at(event.clientY - box.top, box.height, tall);
    const level = (await levels(image))[down * wide + across];
    const value = level > most ? "unknown" : Number((low + (level / most) * (high - low)).toPrecision(3));
    const fields = {
      row: JSON.parse(image.dataset.rows)[down], column: JSON.parse(image.dataset.columns)[across], value,
    };
    return image.dataset.words.replace(/\{(row|column|value)\}/g, (_, name) => fields[name]);
  }

  function note(text, spot) {
    tip.replaceChildren(make("span", text));
    tip.hidden = false;
    place(spot);
  }

  document.addEventListener("pointermove", async (event) => {
    if (!event.target.matches?.(".pixels")) return;
    const text = await pixel(event.target, event);
    note(text, { left: event.clientX, top: event.clientY, bottom: event.clientY });
  });

  // The arrow keys go from mark to mark of a chart.
  document.addEventListener("keydown", (event) => {
    const chart = event.target.closest?.(".chart");
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const marks = chart && step ? all("[data-tip]", chart) : [];
    if (!marks.length) return;
    event.preventDefault();
    const here = marks.findIndex((mark) => mark.classList.contains("here"));
    const next = here < 0 ? (step > 0 ? 0 : marks.length - 1) : (here + step + marks.length) % marks.length;
    marks[here]?.classList.remove("here");
    marks[next].classList.add("here");
    note(marks[next].dataset.tip, marks[next].getBoundingClientRect());
    document.getElementById("spoken").textContent = marks[next].dataset.tip;
  });

  // Where the page scrolls below a pointer that rests, nothing was pointed at.
  let pointed = "";
  document.addEventListener("pointerover", (event) => {
    const rests = pointed === (pointed = event.clientX + " " + event.clientY);
    if (rests) return;
    const mark = event.target.closest("[data-tip]");
    const what = mark ? null : meant(event.target);
    hide();
    if (mark) note(mark.dataset.tip, mark.getBoundingClientRect());
    if (what) waiting = setTimeout(() => show(what), what.slow ? 500 : 120);
  });
  document.addEventListener("focusin", (event) => {
    const what = event.target.matches(":focus-visible") && meant(event.target);
    hide();
    if (what) show(what);
  });
  document.addEventListener("focusout", (event) => all(".here", event.target).forEach((each) => each.classList.remove("here")));
  document.addEventListener("focusout", hide);
  // Focus scrolls: what is shown for it moves along; what is shown for the pointer vanishes.
  document.addEventListener("scroll", () => {
    const at = document.activeElement;
    const what = !tip.hidden && at.matches(":focus-visible") && meant(at);
    if (what) place(what.at.getBoundingClientRect());
    else hide();
  }, { capture: true, passive: true });
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  const opens = () => {
    const entry = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const closed = entry?.closest("details:not([open])");
    if (!closed) return;
    closed.open = true;
    entry.scrollIntoView();
  };
  all("a.term").forEach((link) => link.addEventListener("click", hide));
  addEventListener("hashchange", opens);
  opens();

  // Ranks by percent.
  for (const box of all(".quantiles")) {
    const steps = said(box.id);
    const slider = box.querySelector("input");
    const numbers = all("dd", box);
    slider.addEventListener("input", () => {
      const [who, values] = steps[slider.value];
      const output = box.querySelector("output");
      output.replaceChildren(make("b", slider.value + " %"), " " + who);
      slider.setAttribute("aria-valuetext", slider.value + " %, " + who);
      numbers.forEach((each, place) => (each.textContent = values[place]));
    });
  }

  // Commands to take along.
  all(".copy").forEach((button) =>
    button.addEventListener("click", async () => {
      const code = button.previousElementSibling;
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => (button.textContent = "Copy"), 1600);
    })
  );

  // Where one is.
  const links = new Map(all("nav a").map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        links.forEach((link) => link.removeAttribute("aria-current"));
        links.get(entry.target.id)?.setAttribute("aria-current", "true");
      }
    },
    { rootMargin: "-10% 0px -75% 0px" }
  );
  all("main > section").forEach((section) => seen.observe(section));

  root.dataset.ready = "1";
})();
