// Draws the pictures of the page with ECharts, from the data in it. All texts of a report stay texts: they get into the
// document by textContent, or onto a canvas.
"use strict";

const MIB = 1024 * 1024;
const COLOURS = ["#3b7dd8", "#e0803a", "#4aa564", "#b25fc7", "#c9a227", "#3aa6b9", "#d0566f", "#7c8796", "#8a6d3b", "#5c6bc0"];
const UNEXPLAINED = "unexplained";

const pictures = JSON.parse(document.getElementById("pictures").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const charts = new Map();

function unitOf(bytes) {
  return Math.abs(bytes) >= 1024 * MIB ? [1024 * MIB, "GiB"] : [MIB, "MiB"];
}

function amount(bytes) {
  if (bytes === null || bytes === undefined) return "not known";
  const [unit, name] = unitOf(bytes);
  return `${(bytes / unit).toFixed(1)} ${name}`;
}

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function styleOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// What is under the pointer: each line in bytes, with its share, the largest on top.
function tooltip(picture, view, turn) {
  const total = view.total[turn];
  const box = element("div", "", { class: "tip" });
  box.append(element("b", `${picture.moments[turn]}, cycle ${picture.cycles[turn]}`));
  const table = element("table");
  const rows = view.lines.map((line) => [line.name, line.bytes[turn]]).reverse();
  rows.push([view.device === "cpu" ? "as the kernel counts" : "as the driver counts", total]);
  for (const [name, bytes] of rows) {
    const row = element("tr");
    const share = total && bytes !== null ? `${((100 * bytes) / total).toFixed(0)} %` : "";
    row.append(element("td", name), element("td", amount(bytes)), element("td", share));
    table.append(row);
  }
  box.append(table);
  return box;
}

// Each moment is the middle of a plateau, so that a sleep of one stage has a width.
function points(sizes, unit) {
  return sizes.map((bytes, turn) => [turn, bytes === null ? null : bytes / unit]);
}

function series(view, unit) {
  const hatch = { symbol: "rect", dashArrayX: [1, 0], dashArrayY: [2, 4], rotation: -Math.PI / 4, color: styleOf("--page") };
  const stacked = view.lines.map((line, turn) => {
    const colour = line.name === UNEXPLAINED ? styleOf("--dim") : COLOURS[turn % COLOURS.length];
    const decal = line.name === UNEXPLAINED ? hatch : undefined;
    return {
      name: line.name,
      type: "line",
      stack: "all",
      symbol: "none",
      step: "middle",
      lineStyle: { width: 1, color: colour },
      itemStyle: { color: colour, decal },
      areaStyle: { opacity: 0.75 },
      emphasis: { focus: "series" },
      data: points(line.bytes, unit),
    };
  });
  const total = {
    name: "in all",
    type: "line",
    symbol: "none",
    step: "middle",
    lineStyle: { width: 2, color: styleOf("--text"), type: "dotted" },
    itemStyle: { color: styleOf("--text") },
    data: points(view.total, unit),
    z: 5,
  };
  return [...stacked, total];
}

function option(picture, view, width) {
  // Not bytes: the axis has round numbers of its unit.
  const [unit, name] = unitOf(Math.max(...view.total));
  const lines = series(view, unit);
  if (picture.asleep.length && lines.length) {
    lines[0].markArea = {
      silent: true,
      itemStyle: { color: styleOf("--asleep") },
      label: { color: styleOf("--dim"), position: "insideTop" },
      data: picture.asleep.map(([first, last]) => [{ name: "asleep", xAxis: first - 0.5 }, { xAxis: last + 0.5 }]),
    };
  }
  const many = picture.moments.length > 24;
  return {
    animation: false,
    aria: { enabled: true },
    textStyle: { fontFamily: "system-ui, sans-serif" },
    grid: { left: 52, right: 16, top: 52, bottom: many ? 100 : 74 },
    legend: { type: "scroll", top: 0, itemWidth: 14, itemHeight: 10, textStyle: { color: styleOf("--text") } },
    tooltip: {
      trigger: "axis",
      confine: true,
      backgroundColor: styleOf("--card"),
      borderColor: styleOf("--line"),
      textStyle: { color: styleOf("--text") },
      formatter: (under) => tooltip(picture, view, under[0].dataIndex),
    },
    xAxis: {
      type: "value",
      min: 0,
      max: picture.moments.length - 1,
      minInterval: 1,
      interval: many || width < 26 * picture.moments.length ? undefined : 1,
      splitLine: { show: false },
      axisLabel: {
        color: styleOf("--dim"),
        rotate: 40,
        hideOverlap: true,
        formatter: (turn) => (Number.isInteger(turn) ? `${picture.cycles[turn]} · ${picture.moments[turn]}` : ""),
      },
    },
    yAxis: {
      type: "value",
      name,
      nameTextStyle: { color: styleOf("--dim") },
      // What is unexplained may be a little below 0.
      min: ({ min, max }) => (min < 0 && -min < max / 50 ? 0 : null),
      axisLabel: { color: styleOf("--dim") },
      splitLine: { lineStyle: { color: styleOf("--line") } },
    },
    dataZoom: many
      ? [
          { type: "slider", height: 18, bottom: 6, ...lastCycles(picture) },
          { type: "inside", zoomOnMouseWheel: "ctrl", ...lastCycles(picture) },
        ]
      : [],
    series: lines,
  };
}

// A long life opens on its last cycles; the slider goes back.
function lastCycles(picture) {
  const end = picture.moments.length - 1;
  const cycle = picture.cycles[end] - 2;
  const first = picture.cycles.findIndex((each) => each >= cycle);
  return { startValue: Math.max(0, Math.min(first, end - 8)), endValue: end };
}

function draw(place, picture, view) {
  const chart = charts.get(place) || echarts.init(place, null, { renderer: "canvas" });
  charts.set(place, chart);
  place.drawn = [picture, view];
  chart.setOption(option(picture, view, place.clientWidth), true);
}

function nameOf(view) {
  return `${view.process}, ${view.device}`;
}

// The views to choose from: each one that is ticked is drawn, two beside each other where there is room.
function show(holder, picture) {
  const choice = element("fieldset", "", { class: "choice" });
  choice.append(element("legend", "memory of"));
  const area = element("div", "", { class: "pictures" });
  picture.views.forEach((view, turn) => {
    const label = element("label");
    const box = element("input", "", { type: "checkbox" });
    const figure = element("figure", "", { hidden: "" });
    const place = element("div", "", { class: "chart", role: "img", "aria-label": `${nameOf(view)}, stage by stage` });
    figure.append(element("figcaption", nameOf(view)), place);
    area.append(figure);
    box.addEventListener("change", () => {
      figure.hidden = !box.checked;
      if (box.checked) draw(place, picture, view);
      redraw();
    });
    label.append(box, ` ${nameOf(view)}`);
    choice.append(label);
    if (turn === 0) {
      box.checked = true;
      figure.hidden = false;
      requestAnimationFrame(() => draw(place, picture, view));
    }
  });
  holder.append(...(picture.views.length > 1 ? [choice] : []), area);
}

// Nothing is drawn before it is seen: a page may have a hundred lives.
const watch = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    watch.unobserve(entry.target);
    show(entry.target, pictures[entry.target.dataset.life]);
  }
});
for (const holder of document.querySelectorAll("[data-life]")) watch.observe(holder);

function redraw() {
  charts.forEach((chart, place) => {
    chart.resize();
    draw(place, ...place.drawn);
  });
}

window.addEventListener("resize", redraw);
dark.addEventListener("change", redraw);
