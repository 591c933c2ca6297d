// Draws trends, types that became more, the flame graph of allocation stacks, and the treemap of who holds what.
"use strict";

const VERDICTS = { growth: "--bad", residue: "--odd", bounded: "--good" };

function axisStyle() {
  return { axisLabel: { color: styleOf("--dim"), hideOverlap: true }, splitLine: { lineStyle: { color: styleOf("--line") } } };
}

// What was found about a series, as a line over it: from its first point to its last one where it grows, level at
// what stays where it does not.
function verdictLine(judged, changes) {
  const colour = styleOf(VERDICTS[judged.trend]);
  const last = changes.length - 1;
  const end = changes[last] ?? 0;
  const start = judged.trend === "growth" ? (changes[0] ?? 0) : end;
  return {
    silent: true,
    symbol: ["none", "arrow"],
    lineStyle: { color: colour, width: 2, type: "dashed" },
    label: { formatter: judged.trend, position: "middle", color: colour, fontWeight: "bold" },
    data: [[{ coord: [0, start] }, { coord: [last, end] }]],
  };
}

function trendOption(trend) {
  const first = trend.series.map((each) => each.bytes.find((bytes) => bytes !== null) ?? 0);
  const most = largest(trend.series.flatMap((each, turn) => each.bytes.map((bytes) => Math.abs((bytes ?? first[turn]) - first[turn]))));
  const [unit, name] = unitOf(most);
  const series = trend.series.map((each, turn) => {
    const changes = each.bytes.map((bytes) => (bytes === null ? null : (bytes - first[turn]) / unit));
    const judged = trend.judged.find((found) => found.series === each.name);
    return {
      name: each.name,
      type: "line",
      symbolSize: trend.occurrences.length > 40 ? 0 : 5,
      lineStyle: { width: 2, color: COLOURS[turn % COLOURS.length] },
      itemStyle: { color: COLOURS[turn % COLOURS.length] },
      data: changes,
      markLine: judged && verdictLine(judged, changes),
    };
  });
  return {
    aria: { enabled: true },
    grid: { left: 60, right: 24, top: 52, bottom: trend.occurrences.length > 40 ? 76 : 46 },
    legend: { type: "scroll", top: 0, itemWidth: 14, itemHeight: 14, textStyle: { color: styleOf("--text") } },
    tooltip: {
      ...tooltipStyle(),
      trigger: "axis",
      formatter: (under) => {
        const at = under[0].dataIndex;
        const rows = trend.series.map((each, turn) => {
          const bytes = each.bytes[at];
          return [each.name, amount(bytes), bytes === null ? "" : `${bytes >= first[turn] ? "+" : "−"}${amount(Math.abs(bytes - first[turn]))}`];
        });
        return tip(`${trend.stage}, cycle ${trend.occurrences[at]}`, rows);
      },
    },
    xAxis: { type: "category", data: trend.occurrences, name: "cycle", nameLocation: "middle", nameGap: 26, ...axisStyle() },
    yAxis: { type: "value", name: `${name} since the first`, nameTextStyle: { color: styleOf("--dim"), align: "left" }, ...axisStyle() },
    dataZoom: trend.occurrences.length > 40 ? [{ type: "slider", height: 18, bottom: 6 }] : [],
    series,
  };
}

function showTrends(holder, trends) {
  const choice = element("p");
  const label = element("label", "after each ");
  const select = element("select");
  trends.forEach((trend, turn) => select.append(element("option", trend.stage, { value: turn })));
  label.append(select);
  choice.append(label);
  const place = element("div", "", { class: "chart", role: "img" });
  const found = element("ul");
  const show = () => {
    const trend = trends[select.value];
    place.setAttribute("aria-label", `change of memory after each ${trend.stage}`);
    found.replaceChildren(...trend.judged.map((judged) => element("li", judged.text)));
    draw(place, () => trendOption(trend));
  };
  select.addEventListener("change", show);
  holder.append(choice, place, found);
  show();
}

// How many more, not before and after: of a thousand new blocks nothing is seen beside all of the process's tuples.
function showGrowth(holder, grown) {
  const types = grown.map((each) => ({ ...each, more: each.after - each.before })).sort((one, other) => one.more - other.more);
  const place = element("div", "", { class: "chart", role: "img", "aria-label": "how many more objects there are of each type; the table below has the figures" });
  place.style.height = `${50 + 26 * types.length}px`;
  holder.append(place);
  draw(place, (width) => ({
    aria: { enabled: true },
    grid: { left: 12, right: 72, top: 8, bottom: 30, containLabel: true },
    tooltip: {
      ...tooltipStyle(),
      trigger: "axis",
      axisPointer: { type: "shadow" },
      formatter: ([{ dataIndex }]) => {
        const { type, since, until, before, after, more } = types[dataIndex];
        return tip(type, [[since, String(before)], [until, String(after)], ["more", String(more)]]);
      },
    },
    xAxis: { type: "value", minInterval: 1, ...axisStyle() },
    yAxis: {
      type: "category",
      data: types.map((each) => each.type),
      axisLabel: { color: styleOf("--text"), width: Math.min(360, 0.4 * width), overflow: "truncate" },
    },
    series: [
      {
        name: "more",
        type: "bar",
        itemStyle: { color: COLOURS[1] },
        label: { show: true, position: "right", color: styleOf("--text"), formatter: ({ value }) => `+${value}` },
        data: types.map((each) => each.more),
      },
    ],
  }));
}

// The rectangles of a flame graph below one node: where each begins and how wide it is, in bytes.
function rectangles(root) {
  const found = [];
  const waiting = [[root, 0, 0]];
  while (waiting.length) {
    const [node, depth, start] = waiting.pop();
    found.push({ name: node.name, value: [depth, start, start + node.bytes, node.bytes], node });
    let at = start;
    for (const child of node.children) {
      // Narrower than what a screen shows.
      if (child.bytes * 2000 > root.bytes) waiting.push([child, depth + 1, at]);
      at += child.bytes;
    }
  }
  return found;
}

function colourOf(name) {
  let sum = 0;
  for (const letter of name) sum = (sum * 31 + letter.codePointAt(0)) % 997;
  return `hsl(${15 + (sum % 40)} 75% ${isDark() ? 42 : 68}%)`;
}

function frame(parameters, api) {
  const [left, top] = api.coord([api.value(1), api.value(0)]);
  const [right] = api.coord([api.value(2), api.value(0)]);
  const height = api.size([0, 1])[1];
  const width = Math.max(1, right - left - 1);
  return {
    type: "rect",
    shape: { x: left, y: top - height / 2, width, height: height - 1 },
    style: { fill: api.visual("color") },
    textContent: width < 30 ? undefined : { style: { text: api.value(4), fill: styleOf("--text"), width: width - 6, overflow: "truncate", fontSize: 12 } },
    textConfig: { position: "insideLeft" },
  };
}

function flameOption(root, whole) {
  const shown = rectangles(root);
  const depth = largest(shown.map((each) => each.value[0]));
  return {
    aria: { enabled: true },
    grid: { left: 0, right: 0, top: 4, bottom: 4 },
    tooltip: {
      ...tooltipStyle(),
      formatter: ({ data }) => tip(data.name, [[amount(data.value[3]), `${((100 * data.value[3]) / whole).toFixed(1)} % of all`]]),
    },
    xAxis: { type: "value", show: false, min: 0, max: root.bytes },
    yAxis: { type: "value", show: false, inverse: true, min: -0.5, max: depth + 0.5 },
    series: [
      {
        type: "custom",
        renderItem: frame,
        encode: { x: [1, 2], y: 0 },
        data: shown.map((each) => ({ ...each, value: [...each.value, each.name], itemStyle: { color: colourOf(each.name) } })),
      },
    ],
  };
}

function showFlame(holder, root) {
  const whole = element("button", "show all", { type: "button", hidden: "" });
  const place = element("div", "", { class: "chart", role: "img", "aria-label": "flame graph of what did not come back; each finding has its stack as text" });
  holder.append(whole, place);
  const show = (node) => {
    whole.hidden = node === root;
    place.style.height = `${24 * (1 + deepest(node))}px`;
    charts.get(place)?.chart.resize();
    draw(place, () => flameOption(node, root.bytes));
  };
  whole.addEventListener("click", () => show(root));
  show(root);
  charts.get(place).chart.on("click", ({ data }) => show(data.node));
}

function deepest(root) {
  return largest(rectangles(root).map((each) => each.value[0]));
}

function treemapNode(node) {
  return { name: node.name, value: node.bytes, children: node.children.map(treemapNode) };
}

function showTreemap(holder, root) {
  const place = element("div", "", { class: "chart", role: "img", "aria-label": "treemap of who holds what; each finding has its path as text" });
  holder.append(place);
  const data = root.children.map(treemapNode);
  const label = { formatter: ({ name, value }) => `${name} · ${amount(value)}`, overflow: "truncate" };
  const coloured = { color: COLOURS, colorMappingBy: "index", itemStyle: { borderColor: styleOf("--card"), borderWidth: 2, gapWidth: 2 } };
  draw(place, () => ({
    aria: { enabled: true },
    tooltip: {
      ...tooltipStyle(),
      formatter: ({ value, treePathInfo }) => tip(treePathInfo.slice(1).map((each) => each.name).join(""), [[amount(value), `${((100 * value) / root.bytes).toFixed(1)} % of all`]]),
    },
    series: [
      {
        type: "treemap",
        name: "all",
        left: 0,
        right: 0,
        top: 4,
        bottom: 34,
        roam: false,
        leafDepth: 3,
        visibleMin: 60,
        label,
        upperLabel: { ...label, show: true, height: 20, color: styleOf("--text") },
        levels: [{ ...coloured, upperLabel: { show: false } }, coloured, coloured, coloured],
        breadcrumb: { itemStyle: { color: styleOf("--card"), textStyle: { color: styleOf("--text") } } },
        data,
      },
    ],
  }));
}

whenSeen("trends", showTrends);
whenSeen("growth", showGrowth);
whenSeen("stacks", showFlame);
whenSeen("holders", showTreemap);
