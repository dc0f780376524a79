"use strict";
(() => {
  const root = document.documentElement;
  const all = (query, from = document) => [...from.querySelectorAll(query)];
  const make = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
  const said = (name) => JSON.parse(document.getElementById("spec-" + name).textContent);

  // Charts: colors are the style sheet's properties, so that a change of theme is a new drawing.
  const PAPER_WIDTH = 690;
  const charts = all(".chart").map((box) => ({ box, views: said(box.dataset.figure), at: 0 }));

  function painted(value, style) {
    if (typeof value === "string") {
      return value.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
    }
    if (Array.isArray(value)) return value.map((each) => painted(each, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, painted(each, style)]));
  }

  function draw(chart) {
    const { data, layout } = painted(chart.views[chart.at], getComputedStyle(root));
    const width = root.dataset.paper ? PAPER_WIDTH : chart.box.clientWidth;
    const options = { displayModeBar: false, responsive: false, showTips: false };
    chart.width = width;
    chart.box.style.minHeight = "";
    return Plotly.react(chart.box, data, { ...layout, width }, options);
  }

  const drawAll = () => Promise.all(charts.map(draw));

  // First what one sees, then the rest while nothing else is to be done.
  async function drawInTurn() {
    const seen = charts.filter(({ box }) => box.getBoundingClientRect().top < innerHeight);
    for (const chart of seen) await draw(chart);
    root.dataset.ready = "1";
    for (const chart of charts.filter((each) => !seen.includes(each))) {
      await new Promise((next) => requestIdleCallback(next, { timeout: 300 }));
      if (!chart.width) await draw(chart);
    }
    root.dataset.drawn = charts.length;
  }

  const onScreen = () => root.dataset.ready && !root.dataset.paper && drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onScreen);
  let resized;
  addEventListener("resize", () => {
    clearTimeout(resized);
    resized = setTimeout(() => {
      if (charts.some((chart) => chart.width !== chart.box.clientWidth)) onScreen();
    }, 120);
  });

  // On paper everything is light, open, and as wide as the sheet.
  let opened = [];
  addEventListener("beforeprint", () => {
    root.dataset.paper = "1";
    opened = all("details:not([open])");
    opened.forEach((each) => (each.open = true));
    drawAll();
  });
  addEventListener("afterprint", () => {
    delete root.dataset.paper;
    opened.forEach((each) => (each.open = false));
    drawAll();
  });

  for (const chart of charts) {
    const figure = chart.box.closest("figure");
    all(".views input", figure).forEach((input) =>
      input.addEventListener("change", () => {
        chart.at = Number(input.value);
        all("[data-view]", figure).forEach((note) => (note.hidden = note.dataset.view !== input.value));
        draw(chart);
      })
    );
  }

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
    const spot = at.getBoundingClientRect();
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

  document.addEventListener("pointerover", (event) => {
    const what = meant(event.target);
    hide();
    if (what) waiting = setTimeout(() => show(what), what.slow ? 500 : 120);
  });
  document.addEventListener("focusin", (event) => {
    const what = event.target.matches(":focus-visible") && meant(event.target);
    hide();
    if (what) show(what);
  });
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", hide, { capture: true, passive: true });
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  all("a.term").forEach((link) => link.addEventListener("click", hide));

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

  addEventListener("DOMContentLoaded", drawInTurn);
})();
