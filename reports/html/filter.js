// Filters the page's findings, and subjects without one: what is left is listed, and each can be opened.
"use strict";

const MOST_LINES = 100;

const form = document.querySelector("form.filter");
const words = form.querySelector("input");
const matches = document.getElementById("matches");
const all = document.getElementById("all");
const said = form.querySelector("output");

function lineOf(entry, partOf) {
  const line = element("details", "", { class: "match" });
  const summary = element("summary");
  summary.append(element("span", entry.outcome, { class: entry.outcome }), ` ${entry.subject} `, element("span", entry.title, { class: "dim" }));
  line.append(summary);
  line.addEventListener(
    "toggle",
    async () => {
      const part = element("div");
      // It was escaped when the page was made, as the rest of the page.
      part.innerHTML = await partOf(entry);
      line.append(part);
      document.dispatchEvent(new CustomEvent("inserted", { detail: part }));
    },
    { once: true },
  );
  return line;
}

function outcomeBoxes(entries, changed) {
  const counts = new Map();
  for (const { outcome } of entries) counts.set(outcome, (counts.get(outcome) || 0) + 1);
  return [...counts].map(([outcome, count]) => {
    const label = element("label");
    const box = element("input", "", { type: "checkbox", value: outcome });
    box.addEventListener("change", changed);
    label.append(box, ` ${outcome} (${count.toLocaleString("en")})`);
    return label;
  });
}

async function begin() {
  const index = await stored("index");
  const entries = index.entries.map(([place, outcome, subject, title, details], turn) => ({
    place, outcome, subject, title, turn, text: [outcome, subject, title, details].join(" ").toLowerCase(),
  }));
  const unpacked = new Map();
  const partOf = async (entry) => {
    const chunk = Math.floor(entry.turn / index.chunk);
    if (!unpacked.has(chunk)) unpacked.set(chunk, stored(`entries-${chunk}`));
    return (await unpacked.get(chunk))[entry.turn % index.chunk];
  };

  function list(left, from = 0) {
    const lines = left.slice(from, from + MOST_LINES).map((entry) => lineOf(entry, partOf));
    const rest = left.length - from - lines.length;
    if (rest > 0) {
      const more = element("button", `show ${Math.min(rest, MOST_LINES)} of ${rest.toLocaleString("en")} more`, { type: "button" });
      more.addEventListener("click", () => {
        more.remove();
        matches.append(...list(left, from + MOST_LINES));
      });
      lines.push(more);
    }
    return lines;
  }

  function filter() {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const outcomes = new Set([...form.querySelectorAll("fieldset input:checked")].map((box) => box.value));
    const filtered = wanted.length > 0 || outcomes.size > 0;
    all.hidden = filtered;
    matches.hidden = !filtered;
    if (!filtered) {
      matches.replaceChildren();
      said.textContent = "";
      return;
    }
    const left = entries.filter(
      (entry) => (!outcomes.size || outcomes.has(entry.outcome)) && wanted.every((word) => entry.text.includes(word)),
    );
    matches.replaceChildren(...list(left));
    said.textContent = `${left.length.toLocaleString("en")} of ${entries.length.toLocaleString("en")}`;
  }

  function showAll() {
    words.value = "";
    form.querySelectorAll("fieldset input").forEach((box) => (box.checked = false));
    filter();
  }

  // A link to a finding that is no element yet shows it by itself.
  function follow() {
    const place = location.hash.slice(1);
    const there = document.getElementById(place);
    const entry = entries.find((each) => each.place === place);
    if (there) {
      if (all.hidden && all.contains(there)) {
        showAll();
        there.scrollIntoView();
      }
    } else if (entry) {
      const line = lineOf(entry, partOf);
      all.hidden = true;
      matches.hidden = false;
      said.textContent = "1 of those that are linked";
      const back = element("button", "show the whole page", { type: "button" });
      back.addEventListener("click", showAll);
      matches.replaceChildren(back, line);
      line.open = true;
      line.scrollIntoView();
    }
  }

  form.querySelector("fieldset").append(...outcomeBoxes(entries, filter));
  form.addEventListener("submit", (event) => event.preventDefault());
  words.addEventListener("input", filter);
  addEventListener("hashchange", follow);
  form.hidden = false;
  follow();
}

begin();
