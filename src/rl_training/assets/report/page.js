"use strict";
// Redraws the charts by what the reader asks for, and shows the figures under the pointer.
// Without it the page has the same curves over steps.
(() => {
  const tip = document.getElementById("tip");
  const round = (v) => Math.round(v * 100) / 100;
  const short = (v) => Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : Number(v.toPrecision(4)).toString();

  // Axes, as charts.py has them

  const stepOf = (raw) => {
    const power = 10 ** Math.max(Math.floor(Math.log10(raw)), -300);
    return [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  };
  const ticks = (low, high, count) => {
    const step = stepOf((high - low) / Math.max(count - 1, 1));
    const marks = [];
    for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) marks.push(Number((i * step).toPrecision(12)));
    return marks;
  };
  const logTicks = (low, high) => {
    const wide = Math.log10(high / low), marks = [];
    const each = wide > 2.5 ? [1] : wide > 1 ? [1, 3] : [1, 2, 3, 4, 5, 6, 8];
    const every = Math.max(1, Math.ceil(wide / 6));
    for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) {
      if (p % every) continue;
      marks.push(...each.map((m) => m * 10 ** p));
    }
    return marks.filter((m) => m >= low * 0.999 && m <= high * 1.001);
  };
  const labels = (values) => {
    const size = Math.max(...values.map(Math.abs));
    if (size && size < 1e-3) {
      const power = Math.floor(Math.log10(size));
      return values.map((v) => v ? Number((v / 10 ** power).toPrecision(4)) + "e" + power : "0");
    }
    const [limit, unit] = [[1e9, "G"], [1e6, "M"], [1e4, "k"], [0, ""]].find(([l]) => size >= l);
    const scale = unit === "k" ? 1e3 : limit || 1;
    let decimals = 0;
    while (decimals < 6 && values.some((v) => Math.abs(Number((v / scale).toFixed(decimals)) - v / scale) > 1e-9 * size / scale)) decimals++;
    const digits = { minimumFractionDigits: decimals, maximumFractionDigits: decimals };
    return values.map((v) => v ? (v / scale).toLocaleString("en", digits) + unit : "0");
  };
  const UNITS = [[7200, 3600, "h"], [120, 60, "min"], [0, 1, "s"]];
  const timeText = (seconds) => {
    const [, unit, name] = UNITS.find(([least]) => seconds >= least);
    return short(seconds / unit) + " " + name;
  };

  // What a chart shows now

  const between = (pairs, x) => {
    const after = pairs.findIndex((p) => p[0] >= x);
    if (after < 0) return NaN;
    const [x1, y1] = pairs[after];
    if (x1 === x) return y1;
    const [x0, y0] = after ? pairs[after - 1] : [0, 0];
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0);
  };
  const placed = (series, state) => {
    const at = (step) => state.time ? between(series.seconds, step) : step;
    const move = (rows) => rows.map(([step, ...rest]) => [at(step), ...rest, step])
      .filter(([x]) => Number.isFinite(x) && (!state.logX || x > 0));
    return { ...series, points: move(series.points), band: move(series.band), faint: series.faint.map(move) };
  };
  const view = (chart, state) => {
    const lines = chart.series.filter((s) => !state.hidden.has(s.number)).map((s) => placed(s, state)).filter((s) => s.points.length);
    if (!lines.length) return null;
    const xs = lines.flatMap((s) => s.points.map((p) => p[0]));
    let [x0, x1] = state.zoom || [Math.min(...xs), Math.max(...xs)];
    if (x0 === x1) [x0, x1] = state.logX ? [x0 / 2, x1 * 2] : [x0 - 1, x1 + 1];
    const inside = (rows) => rows.filter((p) => p[0] >= x0 && p[0] <= x1);
    const heights = (of) => of.flatMap((s) => [
      ...inside(s.points).map((p) => p[1]), ...inside(s.band).flatMap((p) => [p[1], p[2]]), ...s.faint.flatMap((f) => inside(f).map((p) => p[1])),
    ]);
    const ys = heights(lines);
    if (!ys.length) ys.push(...lines.flatMap((s) => s.points.map((p) => p[1])));
    let [y0, y1] = [Math.min(...ys), Math.max(...ys)];
    const logY = state.logY && y0 > 0;
    if (logY) {
      const pad = Math.max((y1 / y0) ** 0.04, 1.02);
      [y0, y1] = [y0 / pad, y1 * pad];
    } else {
      const pad = y0 === y1 ? Math.max(Math.abs(y0) * 0.1, 0.5) : (y1 - y0) * 0.04;
      [y0, y1] = [y0 - pad, y1 + pad];
    }
    const scale = (low, high, start, end, log) => {
      const f = log ? Math.log : (v) => v;
      const to = (v) => round(start + (f(v) - f(low)) / (f(high) - f(low)) * (end - start));
      to.back = (place) => {
        const v = f(low) + (place - start) / (end - start) * (f(high) - f(low));
        return log ? Math.exp(v) : v;
      };
      return to;
    };
    const { left, right, top, bottom, width, height } = chart;
    return {
      lines, x0, x1, y0, y1, logY,
      across: scale(x0, x1, left, width - right, state.logX), up: scale(y0, y1, height - bottom, top, logY),
    };
  };
  const add = (parent, name, attributes, text) => {
    const node = document.createElementNS(parent.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  };
  const draw = (chart, state) => {
    const now = chart.now = view(chart, state), svg = chart.svg;
    const { left, right, top, bottom, width, height } = chart, floor = height - bottom, end = width - right;
    svg.replaceChildren();
    const say = (text) => add(svg, "text", { x: end, y: top + 10, "text-anchor": "end" }, text);
    if (!now) return void say(state.time ? "no times here" : "nothing to show");
    const yTicks = now.logY ? logTicks(now.y0, now.y1) : ticks(now.y0, now.y1, 7);
    const yLabels = now.logY ? yTicks.map((v) => labels([v])[0]) : labels(yTicks);
    yTicks.forEach((tick, i) => {
      const y = now.up(tick);
      add(svg, "line", { class: "grid", x1: left, x2: end, y1: y, y2: y });
      add(svg, "text", { x: left - 8, y: round(y + 4), "text-anchor": "end" }, yLabels[i]);
    });
    const [, unit, name] = state.time ? UNITS.find(([least]) => now.x1 >= least) : [0, 1, "step"];
    const xTicks = (state.logX ? logTicks(now.x0 / unit, now.x1 / unit) : ticks(now.x0 / unit, now.x1 / unit, width > 500 ? 6 : 4)).map((v) => v * unit);
    const xLabels = state.logX ? xTicks.map((v) => labels([v / unit])[0]) : labels(xTicks.map((v) => v / unit));
    let free = left + 14;
    xTicks.forEach((tick, i) => {
      const x = now.across(tick), half = xLabels[i].length * 3.4, last = x > end - 12;
      if (x - half * (last ? 2 : 1) < free) return;
      free = x + (last ? 0 : half) + 6;
      add(svg, "text", { x, y: floor + 18, "text-anchor": last ? "end" : "middle" }, xLabels[i]);
    });
    add(svg, "text", { x: left - 8, y: floor + 18, "text-anchor": "end" }, name);
    add(svg, "line", { class: "axis", x1: left, x2: end, y1: floor, y2: floor });
    if (state.logY && !now.logY) say("linear: not all above 0");
    const plot = add(svg, "svg", { x: left, y: top - 4, width: end - left + 2, height: floor - top + 8, viewBox: `${left} ${top - 4} ${end - left + 2} ${floor - top + 8}` });
    const path = (rows) => "M" + rows.map((p) => now.across(p[0]) + " " + now.up(p[1])).join("L");
    for (const s of now.lines) {
      const above = (rows) => now.logY ? rows.filter((p) => p[1] > 0) : rows;
      if (s.band.length > 1) {
        const there = s.band.map((p) => now.across(p[0]) + "," + now.up(p[2]));
        const back = s.band.map((p) => now.across(p[0]) + "," + now.up(p[1])).reverse();
        add(plot, "polygon", { class: "band c" + s.color, points: [...there, ...back].join(" ") });
      }
      for (const f of s.faint) if (above(f).length) add(plot, "path", { class: "faint c" + s.color, d: path(above(f)) });
      const dash = s.dash ? { "stroke-dasharray": s.dash } : {};
      const points = above(s.points);
      add(plot, "path", { class: "curve c" + s.color, ...dash, d: path(points) });
      if (points.length < 25) for (const p of points) add(plot, "circle", { class: "dot c" + s.color, cx: now.across(p[0]), cy: now.up(p[1]), r: 2.6 });
    }
    add(svg, "line", { class: "cursor", x1: 0, x2: 0, y1: top, y2: floor });
  };

  // The pointer

  const placeOf = (chart, event) => {
    const box = chart.svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * chart.width / box.width;
    return Math.min(Math.max(x, chart.left), chart.width - chart.right);
  };
  const hide = (chart) => {
    tip.hidden = true;
    chart.svg.querySelector(".cursor")?.style.removeProperty("visibility");
  };
  const show = (chart, state, event) => {
    if (!chart.now) return;
    const { lines, across, x0, x1 } = chart.now, x = placeOf(chart, event);
    const nearest = (rows) => rows.reduce((a, b) => Math.abs(across(b[0]) - x) < Math.abs(across(a[0]) - x) ? b : a);
    const found = lines.map((s) => [s, s.points.filter((p) => p[0] >= x0 && p[0] <= x1)]).filter(([, rows]) => rows.length).map(([s, rows]) => [s, nearest(rows)]);
    if (!found.length) return;
    const near = nearest(found.map(([, p]) => p));
    const cursor = chart.svg.querySelector(".cursor");
    for (const name of ["x1", "x2"]) cursor.setAttribute(name, across(near[0]));
    cursor.style.visibility = "visible";
    const where = (p) => state.time ? timeText(p[0]) : short(p[0]);
    tip.replaceChildren((state.time ? "" : "step ") + where(near));
    for (const [s, p] of found) {
      const row = document.createElement("div");
      row.className = "c" + s.color;
      const band = s.band.find((b) => b[0] === p[0]);
      const text = s.label + ": " + short(p[1]) + (band ? " [" + short(band[1]) + ", " + short(band[2]) + "]" : "");
      row.append(document.createElement("i"), p[0] === near[0] ? text : text + " at " + where(p));
      tip.append(row);
    }
    tip.hidden = false;
    tip.style.left = Math.max(8, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.max(8, event.clientY - tip.offsetHeight - 14) + "px";
  };

  // What the reader may ask for, in each task

  for (const section of document.querySelectorAll("section.task")) {
    const state = { hidden: new Set(), time: false, logX: false, logY: false, zoom: null };
    const charts = [...section.querySelectorAll("svg[data-chart]")].map((svg) => {
      const { width, height } = svg.viewBox.baseVal;
      return { svg, width, height, ...JSON.parse(svg.dataset.chart) };
    });
    if (!charts.length) continue;
    const controls = section.querySelector(".controls");
    const button = (name) => controls.querySelector(`[data-do="${name}"]`);
    const redraw = () => {
      for (const chart of charts) draw(chart, state);
      button("step").setAttribute("aria-pressed", !state.time);
      button("time").setAttribute("aria-pressed", state.time);
      button("logX").setAttribute("aria-pressed", state.logX);
      button("logY").setAttribute("aria-pressed", state.logY);
      button("whole").hidden = !state.zoom;
      tip.hidden = true;
    };
    const change = (changes) => redraw(Object.assign(state, changes));
    button("step").onclick = () => change({ time: false, zoom: null });
    button("time").onclick = () => change({ time: true, zoom: null });
    button("logX").onclick = () => change({ logX: !state.logX, zoom: null });
    button("logY").onclick = () => change({ logY: !state.logY });
    button("whole").onclick = () => change({ zoom: null });
    button("time").hidden = !charts.some((chart) => chart.series.some((s) => s.seconds.length));
    controls.hidden = false;
    for (const key of section.querySelectorAll("button.key")) {
      key.disabled = false;
      key.onclick = () => {
        const number = Number(key.dataset.number), shown = state.hidden.delete(number);
        if (!shown) state.hidden.add(number);
        key.setAttribute("aria-pressed", shown);
        redraw();
      };
    }
    for (const chart of charts) {
      const { svg } = chart;
      let from = null, box = null;
      chart.now = view(chart, state);
      svg.addEventListener("pointerdown", (event) => {
        if (event.button) return;
        from = placeOf(chart, event);
        try { svg.setPointerCapture(event.pointerId); } catch { /* a pointer that has gone */ }
      });
      svg.addEventListener("pointermove", (event) => {
        show(chart, state, event);
        if (from === null || !chart.now) return;
        const to = placeOf(chart, event);
        box ??= add(svg, "rect", { class: "zoom", y: chart.top, height: chart.height - chart.bottom - chart.top });
        box.setAttribute("x", Math.min(from, to));
        box.setAttribute("width", Math.abs(to - from));
      });
      const drop = () => { box?.remove(); from = box = null; };
      svg.addEventListener("pointerup", (event) => {
        const start = from, to = placeOf(chart, event);
        drop();
        if (start === null || !chart.now || Math.abs(to - start) < 8) return;
        const { back } = chart.now.across;
        change({ zoom: [back(Math.min(start, to)), back(Math.max(start, to))] });
      });
      svg.addEventListener("pointercancel", drop);
      svg.addEventListener("pointerleave", () => hide(chart));
      svg.addEventListener("dblclick", () => change({ zoom: null }));
    }
  }
})();
