// What all pictures of the page share: amounts, colours, and that each is drawn when it is seen and again when the
// window or the theme changes.
"use strict";

const MIB = 1024 * 1024;
const COLOURS = ["#3b7dd8", "#e0803a", "#4aa564", "#b25fc7", "#c9a227", "#3aa6b9", "#d0566f", "#7c8796", "#8a6d3b", "#5c6bc0"];

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const page = document.documentElement;
const charts = new Map();

function unitOf(bytes) {
  return Math.abs(bytes) >= 1024 * MIB ? [1024 * MIB, "GiB"] : [MIB, "MiB"];
}

function amount(bytes) {
  if (bytes === null || bytes === undefined) return "not known";
  if (Math.abs(bytes) < MIB) return `${bytes.toLocaleString("en")} bytes`;
  const [unit, name] = unitOf(bytes);
  return `${(bytes / unit).toFixed(1)} ${name}`;
}

// The largest of some numbers, at least 0. Math.max has no room for the hundred thousand of a long life as arguments.
function largest(numbers) {
  return numbers.reduce((most, each) => Math.max(most, each ?? 0), 0);
}

function isDark() {
  return dark.matches && !page.classList.contains("printed");
}

function styleOf(name) {
  return getComputedStyle(page).getPropertyValue(name).trim();
}

// A box with a title and rows of texts, for what is under the pointer.
function tip(title, rows) {
  const box = element("div", "", { class: "tip" });
  box.append(element("b", title));
  const table = element("table");
  for (const cells of rows) {
    const row = element("tr");
    row.append(...cells.map((cell) => element("td", cell)));
    table.append(row);
  }
  box.append(table);
  return box;
}

function tooltipStyle() {
  return {
    confine: true,
    backgroundColor: styleOf("--card"),
    borderColor: styleOf("--line"),
    textStyle: { color: styleOf("--text") },
  };
}

// Draws what an option is made of, now and whenever the place's width or the theme changes.
function draw(place, makeOption) {
  const chart = charts.get(place)?.chart || echarts.init(place, null, { renderer: "canvas" });
  charts.set(place, { chart, makeOption });
  chart.setOption({ animation: false, textStyle: { fontFamily: "system-ui, sans-serif" }, ...makeOption(place.clientWidth) }, true);
  return chart;
}

function redraw() {
  charts.forEach(({ chart, makeOption }, place) => {
    chart.resize();
    draw(place, makeOption);
  });
}

window.addEventListener("resize", redraw);
dark.addEventListener("change", redraw);
// On paper a page is light whatever the theme is. A canvas is printed as it was drawn.
for (const [event, printed] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(event, () => {
    page.classList.toggle("printed", printed);
    redraw();
  });
}

// Nothing is unpacked and drawn before it is seen: a page may have a hundred lives.
function whenSeen(kind, show) {
  const watch = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      watch.unobserve(target);
      stored(target.dataset[kind]).then((data) => show(target, data));
    }
  });
  for (const holder of document.querySelectorAll(`[data-${kind}]`)) watch.observe(holder);
}
