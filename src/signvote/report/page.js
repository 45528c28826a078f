"use strict";
// Draw the curves from the JSON block of the page. No text of the block ever becomes markup.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const MARGIN = { top: 28, right: 14, bottom: 40, left: 52 };
  const data = JSON.parse(document.getElementById("data").textContent);
  const hidden = new Set();
  const hiders = new Map();  // of each panel: hides its tip, unless a tap was inside it
  let drawnAt = 0;  // the width of the window: a phone that scrolls changes its height alone
  let metric = data.metrics[0];

  function element(parent, name, attributes = {}, text = "") {
    const made = name === "svg" || parent.namespaceURI === SVG
      ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    return parent.appendChild(made);
  }

  // The metric that a panel shows: {name, label, share, log}. It is its first one if its task does not measure the chosen one.
  const shownIn = (panel) => panel.metrics.find((m) => m.name === metric) || panel.metrics[0];
  const show = (m, value) => (m.share ? (100 * value).toFixed(2) + " %" : value.toPrecision(4));

  // Points that can be drawn: {round, mean, low, high}. A value that is not a number, or not positive on a log axis, is left out.
  function points(m, series) {
    const curve = series.curves[m.name];
    return curve.round
      .map((round, i) => ({ round, mean: curve.mean[i], low: curve.low[i] ?? curve.mean[i], high: curve.high[i] ?? curve.mean[i] }))
      .filter((p) => p.mean !== null && (!m.log || p.mean > 0))
      .map((p) => (m.log ? { ...p, low: Math.max(p.low, p.mean / 10) } : p));
  }

  function steps(low, high, count) {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
    const ticks = [];
    for (let i = Math.ceil(low / step); i * step <= high; i++) ticks.push(i * step);
    return ticks;
  }

  function logSteps(low, high) {
    const ticks = [];
    for (let k = Math.floor(Math.log10(low)); 10 ** k <= high; k++) ticks.push(10 ** k, 2 * 10 ** k, 5 * 10 ** k);
    const inside = ticks.filter((t) => t >= low && t <= high);
    return inside.length > 1 ? inside : steps(low, high, 5);
  }

  function scales(panel, width, height) {
    const m = shownIn(panel);
    const visible = panel.series.filter((s) => !hidden.has(s.id)).flatMap((s) => points(m, s));
    const all = visible.length ? visible : [{ round: 1, low: 0.1, high: 1, mean: 1 }];
    const trained = all.filter((p) => p.round > 0);
    const framed = trained.length ? trained : all;
    const last = Math.max(1, ...all.map((p) => p.round));
    let low = Math.min(...framed.map((p) => p.low)), high = Math.max(...framed.map((p) => p.high));
    if (m === panel.metrics[0] && panel.frame && (panel.frame[0] > 0 || !m.log)) {
      [low, high] = panel.frame;
    } else if (m.share) {
      const margin = Math.max(0.005, 0.05 * (high - low));
      [low, high] = [Math.max(Math.min(0, low), low - margin), Math.min(Math.max(1, high) + 0.005, high + margin)];
    } else if (m.log) {
      [low, high] = [low / 1.15, high * 1.15];
    } else {
      const margin = 0.05 * (high - low || Math.abs(high) || 1);
      [low, high] = [low - margin, high + margin];
    }
    const bend = m.log ? Math.log : (v) => v;
    const [inner, tall] = [width - MARGIN.left - MARGIN.right, height - MARGIN.top - MARGIN.bottom];
    return {
      last, low, high,
      x: (round) => MARGIN.left + (inner * round) / last,
      y: (v) => MARGIN.top + tall * (1 - (bend(v) - bend(low)) / (bend(high) - bend(low))),
      round: (x) => ((x - MARGIN.left) * last) / inner,
    };
  }

  function drawAxes(svg, m, scale, width, height) {
    const bottom = height - MARGIN.bottom;
    const ticks = m.log ? logSteps(scale.low, scale.high) : steps(scale.low, scale.high, 6);
    for (const value of ticks) {
      const y = scale.y(value);
      element(svg, "line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y });
      const text = String(Number((m.share ? 100 * value : value).toPrecision(6)));
      element(svg, "text", { x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" }, text);
    }
    for (const round of steps(0, scale.last, width < 500 ? 4 : 8)) {
      const x = scale.x(round);
      element(svg, "line", { class: "grid", x1: x, x2: x, y1: bottom, y2: bottom + 5 });
      element(svg, "text", { x, y: bottom + 18, "text-anchor": "middle" }, String(Number(round.toPrecision(6))));
    }
    element(svg, "text", { x: (MARGIN.left + width - MARGIN.right) / 2, y: height - 4, "text-anchor": "middle" }, "round");
    element(svg, "text", { x: MARGIN.left - 44, y: 14 }, m.label);
  }

  function drawCurve(parent, m, series, scale) {
    const group = element(parent, "g", { "data-series": series.id, class: "curve" });
    if (hidden.has(series.id)) group.style.display = "none";
    const shown = points(m, series);
    const line = (values) => values.map(([round, v]) => `${scale.x(round).toFixed(1)},${scale.y(v).toFixed(1)}`).join(" ");
    const outline = [...shown.map((p) => [p.round, p.high]), ...shown.map((p) => [p.round, p.low]).reverse()];
    element(group, "polygon", { points: line(outline), fill: series.color, "fill-opacity": 0.14 });
    element(group, "polyline", {
      points: line(shown.map((p) => [p.round, p.mean])), fill: "none", stroke: series.color, "stroke-width": 2,
      "stroke-linejoin": "round", "stroke-dasharray": series.dashes.map((d) => 2 * d).join(" "),
    });
    if (shown.length === 1) {
      element(group, "circle", { cx: scale.x(shown[0].round), cy: scale.y(shown[0].mean), r: 4, fill: series.color });
    }
  }

  // A run that collapsed lies below the frame. A triangle at the edge marks its lowest round; the legend shows its accuracy.
  function drawFalls(svg, panel, scale, height) {
    const bottom = height - MARGIN.bottom, drawn = [];
    if (shownIn(panel) !== panel.metrics[0]) return;
    for (const { fall, color } of panel.series.filter((s) => s.fall && !hidden.has(s.id))) {
      let x = scale.x(fall.round);
      while (drawn.some((other) => Math.abs(x - other) < 12)) x += 12; // so that no triangle hides another
      drawn.push(x);
      const points = `${x - 6},${bottom - 8} ${x + 6},${bottom - 8} ${x},${bottom + 3}`;
      element(svg, "polygon", { class: "fall", points, fill: color });
    }
  }

  function swatch(parent, series) {
    const svg = element(parent, "svg", { width: 30, height: 8, "aria-hidden": "true" });
    const dashes = series.dashes.map((d) => 2 * d).join(" ");
    element(svg, "line", { x1: 0, x2: 30, y1: 4, y2: 4, stroke: series.color, "stroke-width": 2.5, "stroke-dasharray": dashes });
  }

  function pointAt(panel, scale, holder, event) {
    const tip = holder.querySelector(".tip");
    const m = shownIn(panel);
    const visible = panel.series.filter((s) => !hidden.has(s.id)).map((s) => ({ series: s, all: points(m, s) }));
    const rounds = [...new Set(visible.flatMap((v) => v.all.map((p) => p.round)))];
    const at = scale.round(event.clientX - holder.getBoundingClientRect().left);
    const round = rounds.sort((a, b) => Math.abs(a - at) - Math.abs(b - at))[0];
    tip.hidden = round === undefined;
    if (tip.hidden) return;
    tip.replaceChildren();
    element(tip, "div", {}, `round ${round}`);
    visible.map((v) => ({ series: v.series, point: v.all.find((p) => p.round === round) }))
      .filter((v) => v.point).sort((a, b) => b.point.mean - a.point.mean)
      .forEach(({ series, point }) => {
        const row = element(tip, "div");
        swatch(row, series);
        element(row, "b", {}, ` ${show(m, point.mean)} `);
        element(row, "span", {}, series.label);
      });
    const x = scale.x(round);
    const cursor = holder.querySelector(".cursor");
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.style.display = "";
    const right = x > holder.clientWidth / 2;
    tip.style.left = right ? "auto" : `${x + 12}px`;
    tip.style.right = right ? `${holder.clientWidth - x + 12}px` : "auto";
  }

  function drawPanel(panel, holder) {
    const width = Math.max(300, holder.clientWidth), height = Math.round(Math.min(440, Math.max(260, width * 0.5)));
    const m = shownIn(panel);
    holder.replaceChildren();
    const svg = element(holder, "svg", {
      class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${m.name} by round, ${panel.title}`,
    });
    const scale = scales(panel, width, height);
    drawAxes(svg, m, scale, width, height);
    const id = `frame-${data.panels.indexOf(panel)}`;
    element(element(svg, "clipPath", { id }), "rect", {
      x: MARGIN.left, y: MARGIN.top - 2, width: width - MARGIN.left - MARGIN.right + 6, height: height - MARGIN.top - MARGIN.bottom + 2,
    });
    const frame = element(svg, "g", { "clip-path": `url(#${id})` });
    for (const series of panel.series) drawCurve(frame, m, series, scale);
    drawFalls(svg, panel, scale, height);
    const cursor = element(svg, "line", { class: "cursor", y1: MARGIN.top, y2: height - MARGIN.bottom });
    cursor.style.display = "none";
    const tip = element(holder, "div", { class: "tip" });
    tip.hidden = true;
    const hide = () => { tip.hidden = true; cursor.style.display = "none"; };
    for (const kind of ["pointermove", "pointerdown"]) {
      svg.addEventListener(kind, (event) => pointAt(panel, scale, holder, event));
    }
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") hide(); });  // a tap leaves at once
    hiders.set(panel, (target) => { if (!svg.contains(target)) hide(); });
  }

  function legend(panel, parent, redraw) {
    for (const series of panel.series) {
      const attributes = { type: "button", "aria-pressed": "true", "data-series": series.id, title: series.title };
      const button = element(parent, "button", attributes);
      swatch(button, series);
      element(button, "span", {}, series.label);
      if (series.fall) element(button, "small", {}, "\u25bc " + series.fall.text);
      button.addEventListener("click", () => {
        if (!hidden.delete(series.id)) hidden.add(series.id);
        button.setAttribute("aria-pressed", String(!hidden.has(series.id)));
        redraw();
      });
    }
  }

  const drawings = data.panels.map((panel) => {
    const figure = element(document.querySelector(".panels"), "figure", { class: "panel" });
    element(figure, "h3", {}, panel.title);
    const holder = element(figure, "div");
    holder.style.position = "relative";
    const draw = () => drawPanel(panel, holder);
    legend(panel, element(figure, "div", { class: "legend" }), draw);
    return draw;
  });
  const drawAll = () => {
    drawnAt = window.innerWidth;
    drawings.forEach((draw) => draw());
  };

  for (const name of data.metrics) {
    const choices = document.querySelector(".switch");
    const button = element(choices, "button", { type: "button", "aria-pressed": String(name === metric), "data-metric": name }, name);
    button.addEventListener("click", () => {
      metric = name;
      for (const other of choices.children) other.setAttribute("aria-pressed", String(other === button));
      drawAll();
    });
  }
  drawAll();
  window.addEventListener("resize", () => { if (window.innerWidth !== drawnAt) drawAll(); });
  document.addEventListener("pointerdown", (event) => hiders.forEach((hide) => hide(event.target)));

  // A strip tells its rounds in words below it: a finger cannot rest on it, as a mouse can.
  for (const strips of document.querySelectorAll(".strips article")) {
    const tell = (event) => {
      const title = event.target.closest("rect") && event.target.querySelector("title");
      if (title) strips.querySelector(".told").textContent = title.textContent;
    };
    for (const kind of ["pointermove", "pointerdown"]) strips.addEventListener(kind, tell);
  }
})();
