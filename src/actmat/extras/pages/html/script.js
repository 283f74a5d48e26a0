"use strict";
// Works on what is in the page: tooltips, the table of tensors, copying. Texts are set as text, never as HTML.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const make = (tag, attributes, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes ?? {})) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.filter((c) => c !== null));
    return node;
  };

  // A name breaks after a dot or a slash; in long words also after an underscore.
  const dotted = (name) => name.split(/(?<=[./])(?=[^._/\d])/)
    .flatMap((word) => (word.length > 20 ? word.split(/(?<=_)(?=[^_\d])/) : [word]))
    .flatMap((word, i) => (i ? [make("wbr"), word] : [word]));

  // Three significant digits, as the page is written.
  const number = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size && (size >= 1e5 || size < 1e-3)) return String(Number(value.toPrecision(3)).toExponential()).replace("e+", "e");
    return size >= 100 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(3)));
  };

  // Tooltips

  const tip = document.getElementById("tip");
  const hideTip = () => { tip.hidden = true; };
  const showTip = (event) => {
    const target = event.target.closest?.("[data-tip]");
    if (!target) return hideTip();
    tip.textContent = target.dataset.tip;
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const below = event.clientY + 16 + height < innerHeight;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - width - 4))}px`;
    tip.style.top = `${below ? event.clientY + 16 : Math.max(4, event.clientY - height - 10)}px`;
  };
  document.addEventListener("pointermove", showTip, { passive: true });
  document.addEventListener("pointerdown", showTip, { passive: true });
  document.addEventListener("scroll", hideTip, { passive: true });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

  // The table

  const startTable = () => {
    const block = document.getElementById("rows");
    if (!block) return null;
    const { columns, page: size, details } = JSON.parse(block.textContent);
    const table = document.querySelector("table.big");
    const [head, body] = [table.tHead.rows[0], table.tBodies[0]];
    const count = columns[0].values.length;
    const raw = (column, row) => (column.words ? column.words[column.values[row]] : column.values[row]);
    const shown = (column, row) => (column.kind === "number" ? number(raw(column, row)) : String(raw(column, row)));
    const haystack = Array.from({ length: count }, (_, row) =>
      columns.filter((c) => c.kind !== "number").map((c) => raw(c, row)).join("\n").toLowerCase());
    const collator = new Intl.Collator("en", { numeric: true });
    const state = { query: "", chosen: new Map(), sort: null, down: false, page: 0, order: [], open: new Set() };

    const matches = (row) => {
      for (const [column, value] of state.chosen) if (column.values[row] !== value) return false;
      const query = state.query.trim();
      if (query.length > 1 && query.startsWith('"') && query.endsWith('"')) {
        return raw(columns[0], row) === query.slice(1, -1);
      }
      return query.toLowerCase().split(/\s+/).every((word) => haystack[row].includes(word));
    };
    const compare = (a, b) => {
      const [x, y] = [raw(state.sort, a), raw(state.sort, b)];
      if (x === null || y === null) return (x === null) - (y === null) || a - b; // what has no number comes last
      const order = state.sort.kind === "number" ? x - y : collator.compare(x, y);
      return (state.down ? -order : order) || a - b;
    };
    const choose = () => {
      state.order = [];
      for (let row = 0; row < count; row += 1) if (matches(row)) state.order.push(row);
      if (state.sort) state.order.sort(compare);
      state.page = 0;
      draw();
    };

    const output = make("output", { "aria-live": "polite" });
    const back = make("button", { type: "button", onclick: () => turn(-1) }, "Previous");
    const next = make("button", { type: "button", onclick: () => turn(1) }, "Next");
    const turn = (step) => {
      state.page += step;
      draw();
      table.scrollIntoView({ block: "start" });
    };
    const draw = () => {
      const first = state.page * size;
      const rows = state.order.slice(first, first + size);
      body.replaceChildren(...rows.flatMap(drawRow));
      const last = first + rows.length;
      const all = state.order.length === count ? "" : ` (of ${count.toLocaleString("en-US")})`;
      output.textContent = rows.length
        ? `${first + 1}–${last} of ${state.order.length.toLocaleString("en-US")}${all}` : `none of ${count.toLocaleString("en-US")}`;
      back.disabled = state.page === 0;
      next.disabled = last >= state.order.length;
      columns.forEach((column, i) => {
        const cell = head.cells[i];
        if (column === state.sort) cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
        else cell.removeAttribute("aria-sort");
      });
    };
    const drawRow = (row) => {
      const open = state.open.has(row);
      let name = make("code", {}, ...dotted(shown(columns[0], row)));
      if (details) {
        const toggle = () => {
          if (!state.open.delete(row)) state.open.add(row);
          draw();
          body.querySelector(`[data-row="${row}"]`)?.focus();
        };
        name = make("button", { type: "button", class: "open", "data-row": row, "aria-expanded": String(open), onclick: toggle }, name);
      }
      const cells = columns.slice(1).map((c) => make("td", { class: c.kind, "data-label": c.title }, shown(c, row)));
      const line = make("tr", {}, make("th", { scope: "row" }, name), ...cells);
      return open ? [line, make("tr", { class: "detail" }, make("td", { colspan: columns.length }, ...drawDetails(details, row)))] : [line];
    };

    const search = make("input", {
      type: "search", placeholder: 'Filter: words, or an exact "name"', "aria-label": "Filter the table",
      oninput: (event) => { state.query = event.target.value; choose(); },
    });
    const selects = columns.filter((c) => c.kind === "choice" && c.words && c.words.length > 1).map((column) => {
      const options = column.words.map((word, i) => make("option", { value: i }, word));
      const change = (event) => {
        if (event.target.value === "") state.chosen.delete(column);
        else state.chosen.set(column, Number(event.target.value));
        choose();
      };
      return make("select", { "aria-label": `Only this ${column.title}`, onchange: change }, make("option", { value: "" }, `any ${column.title}`), ...options);
    });
    const sortBy = (column, down) => {
      state.sort = column;
      state.down = down;
      choose();
    };
    columns.forEach((column, i) => {
      const click = () => sortBy(column, state.sort === column ? !state.down : column.kind === "number");
      head.cells[i].replaceChildren(make("button", { type: "button", onclick: click }, column.title));
    });
    const orders = columns.map((c, i) => make("option", { value: i }, `by ${c.title}`));
    const narrow = make("select", {
      "aria-label": "Order of the table",
      onchange: (event) => {
        const column = event.target.value === "" ? null : columns[Number(event.target.value)];
        sortBy(column, column?.kind === "number");
      },
    }, make("option", { value: "" }, "in stored order"), ...orders);
    const controls = table.parentNode.querySelector(".controls");
    controls.replaceChildren(search, ...selects, narrow, make("span", { class: "pages" }, output, back, next));
    controls.hidden = false;
    choose();
    return (name) => {
      state.query = search.value = `"${name}"`;
      state.chosen.clear();
      selects.forEach((s) => { s.value = ""; });
      const row = columns[0].values.indexOf(name);
      if (details && row >= 0) state.open.add(row);
      choose();
    };
  };

  // What opens below a row of the table: options, then measures of each matrix

  const drawDetails = (details, row) => {
    const out = [];
    const options = details.options?.words[details.options.values[row]];
    if (options) out.push(make("p", {}, "options ", make("code", {}, options)));
    for (const matrix of details.matrices?.[row] ?? []) {
      if (matrix.part) out.push(make("h4", {}, matrix.part));
      const kept = matrix.values.map((v, i) => [details.head[i + 1], v]).filter(([, v]) => v);
      const top = make("tr", {}, make("th", { scope: "col" }, details.head[0]), ...kept.map(([title]) => make("th", { scope: "col" }, title)));
      const lines = details.experts.map((name, t) =>
        make("tr", {}, make("th", { scope: "row" }, name), ...kept.map(([, v]) => make("td", {}, number(v[t])))));
      out.push(make("div", { class: "scroll" }, make("table", {}, make("thead", {}, top), make("tbody", {}, ...lines))));
      out.push(make("p", { class: "note" }, Object.entries(matrix.facts).map(([k, v]) => `${k} ${number(v)}`).join(" · ")));
      if (matrix.counts) out.push(drawBars(matrix.counts, details.edges));
    }
    if (!out.length) out.push(make("p", { class: "note" }, "No options, and no measures in this page."));
    return out;
  };
  const drawBars = (counts, edges) => {
    const most = Math.max(...counts, 1);
    const svg = document.createElementNS(SVG, "svg");
    const words = `Eigenvalues of S from 1e${edges[0]} to 1e${edges.at(-1)} of the largest, by size`;
    for (const [name, value] of [["class", "bars"], ["viewBox", `0 0 ${counts.length} 1`], ["preserveAspectRatio", "none"], ["role", "img"], ["aria-label", words]]) svg.setAttribute(name, value);
    counts.forEach((n, i) => {
      const bar = document.createElementNS(SVG, "rect");
      for (const [name, value] of [["x", i + 0.05], ["width", 0.9], ["y", 1 - n / most], ["height", n / most]]) bar.setAttribute(name, value);
      bar.dataset.tip = `${n} between 1e${edges[i]} and 1e${edges[i + 1]}`;
      svg.append(bar);
    });
    return make("div", {}, svg, make("p", { class: "note" }, words));
  };

  for (const part of document.querySelectorAll("details.long")) part.open = innerWidth > 736;
  addEventListener("beforeprint", () => { for (const part of document.querySelectorAll("details.long")) part.open = true; });
  const find = startTable();
  document.addEventListener("click", (event) => {
    const link = event.target.closest("[data-find]");
    if (!link || !find) return;
    document.querySelector("table.big").closest("details").open = true;
    find(link.dataset.find);
  });

  // Copying, and where the reader is

  for (const button of document.querySelectorAll(".copy")) {
    button.hidden = false;
    button.addEventListener("click", () => {
      const code = button.parentNode.querySelector("code");
      const done = () => { button.textContent = "Copied"; };
      const select = () => getSelection().selectAllChildren(code);
      if (navigator.clipboard) navigator.clipboard.writeText(code.textContent).then(done, select);
      else select();
    });
  }
  const menu = document.querySelector("nav .menu"); // on a narrow screen, sections are a list that opens
  const fold = (open) => {
    menu.parentNode.classList.toggle("open", open);
    menu.setAttribute("aria-expanded", String(open));
  };
  menu.hidden = false;
  menu.parentNode.classList.add("folding");
  fold(false);
  menu.addEventListener("click", () => fold(!menu.parentNode.classList.contains("open")));
  menu.parentNode.querySelector("ul").addEventListener("click", (event) => {
    fold(false);
    const part = event.target.hash && document.querySelector(`${event.target.hash} details.long`);
    if (part) part.open = true;
  });
  const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      links.forEach((a) => a.removeAttribute("aria-current"));
      links.get(entry.target.id)?.setAttribute("aria-current", "true");
      menu.textContent = links.get(entry.target.id)?.textContent ?? "Sections";
    }
  }, { rootMargin: "-20% 0px -75% 0px" });
  for (const section of document.querySelectorAll("main > section")) seen.observe(section);
})();
