// Draws the life of a subject: what each process held on each device from stage to stage.
"use strict";

const UNEXPLAINED = "unexplained";
const ASLEEP_WIDTH = 35; // pixels of the word "asleep", with some air

const MARGINS = { left: 52, right: 16 };

function countedBy(view) {
  return view.device === "cpu" ? "as the kernel counts" : "as the driver counts";
}

// What is under the pointer: each line in bytes, with its share, the largest on top.
function tooltip(picture, view, turn) {
  const total = view.total[turn];
  const rows = view.lines.map((line) => [line.name, line.bytes[turn]]).reverse();
  rows.push([countedBy(view), total]);
  const shares = rows.map(([name, bytes]) => {
    const share = total && bytes !== null ? `${((100 * bytes) / total).toFixed(0)} %` : "";
    return [name, amount(bytes), share];
  });
  return tip(`${picture.moments[turn]}, cycle ${picture.cycles[turn]}`, shares);
}

// Each moment is the middle of a plateau, so that a sleep of one stage has a width.
function points(sizes, unit) {
  return sizes.map((bytes, turn) => [turn, bytes === null ? null : bytes / unit]);
}

function lifeSeries(view, unit) {
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
    name: countedBy(view),
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

// How wide the narrowest sleep is drawn; pixels.
function narrowest(picture, width) {
  const [from, to] = picture.range || [0, picture.moments.length - 1];
  const shortest = picture.asleep.reduce((least, [first, last]) => Math.min(least, last - first + 1), Infinity);
  return (shortest * (width - MARGINS.left - MARGINS.right)) / (to - from + 1);
}

function lifeOption(picture, view, width) {
  // Not bytes: the axis has round numbers of its unit.
  const [unit, name] = unitOf(largest([view.total, ...view.lines.map((line) => line.bytes)].map(largest)));
  const lines = lifeSeries(view, unit);
  if (picture.asleep.length && lines.length) {
    lines[0].markArea = {
      silent: true,
      itemStyle: { color: styleOf("--asleep") },
      // Where the bands are narrow, as on a phone, the words would lie on each other.
      label: { color: styleOf("--dim"), position: "insideTop", fontSize: 11, show: narrowest(picture, width) > ASLEEP_WIDTH },
      data: picture.asleep.map(([first, last]) => [{ name: "asleep", xAxis: first - 0.5 }, { xAxis: last + 0.5 }]),
    };
  }
  const [from, to] = picture.range || [0, picture.moments.length - 1];
  const many = to - from >= 24;
  return {
    aria: { enabled: true },
    grid: { ...MARGINS, top: 52, bottom: many ? 100 : 74 },
    legend: { type: "scroll", top: 0, itemWidth: 14, itemHeight: 14, textStyle: { color: styleOf("--text") } },
    tooltip: {
      ...tooltipStyle(),
      trigger: "axis",
      formatter: (under) => tooltip(picture, view, under[0].dataIndex),
    },
    xAxis: {
      type: "value",
      min: from,
      max: to,
      minInterval: 1,
      interval: many || width < 26 * (to - from + 1) ? undefined : 1,
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

function nameOf(view) {
  return `${view.process}, ${view.device}`;
}

// The moments of one cycle, with the last one before it: what it began with.
function rangeOf(picture, cycle) {
  const first = picture.cycles.indexOf(cycle);
  return [Math.max(0, first - 1), picture.cycles.lastIndexOf(cycle)];
}

function cycleChoice(picture) {
  const label = element("label", "cycle ");
  const select = element("select", "", { "aria-label": "cycle" });
  select.append(element("option", "all", { value: "" }));
  for (const cycle of new Set(picture.cycles)) select.append(element("option", String(cycle), { value: cycle }));
  select.addEventListener("change", () => {
    picture.range = select.value ? rangeOf(picture, Number(select.value)) : null;
    redraw();
  });
  label.append(select);
  return label;
}

// The views to choose from: each one that is ticked is drawn, two beside each other where there is room.
function showLife(holder, picture) {
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
      if (box.checked) draw(place, (width) => lifeOption(picture, view, width));
      redraw();
    });
    label.append(box, ` ${nameOf(view)}`);
    choice.append(label);
    // All processes together, and the one that holds most.
    if (turn === 0 || (turn === 1 && picture.views.length > 2)) {
      box.checked = true;
      figure.hidden = false;
      requestAnimationFrame(() => draw(place, (width) => lifeOption(picture, view, width)));
    }
  });
  const parts = picture.views.length > 1 ? [choice] : [];
  if (new Set(picture.cycles).size > 1) parts.push(cycleChoice(picture));
  holder.append(...parts, area);
}

whenSeen("life", showLife);
