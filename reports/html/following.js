// Follows a life that is running: draws it again after each stage, and loads the page anew once there is a report.
"use strict";

const holders = { life: document.getElementById("live-life"), trends: document.getElementById("live-trends") };

// What a person has chosen stays as it is.
function again(holder, show, data) {
  const chosen = new Set([...holder.querySelectorAll("input:checked")].map((box) => box.parentElement.textContent));
  const selected = holder.querySelector("select")?.selectedOptions[0].textContent;
  for (const place of holder.querySelectorAll(".chart")) {
    charts.get(place)?.chart.dispose();
    charts.delete(place);
  }
  holder.replaceChildren();
  show(holder, data);
  for (const box of holder.querySelectorAll("input")) {
    if (chosen.size && box.checked !== chosen.has(box.parentElement.textContent)) box.click();
  }
  const option = [...holder.querySelectorAll("option")].find((each) => each.textContent === selected);
  if (option && !option.selected) {
    option.selected = true;
    option.parentElement.dispatchEvent(new Event("change"));
  }
}

const source = new EventSource("events");
source.addEventListener("reload", () => location.reload());
source.addEventListener("life", (event) => {
  const { now, life, trends } = JSON.parse(event.data);
  // The page of a report, or one that has waited, is not that of a life.
  if (!holders.life || "waiting" in document.body.dataset) return location.reload();
  document.getElementById("now").textContent = `RUNNING: ${now}`;
  document.title = `lowtide: ${now}`;
  if (life) again(holders.life, showLife, life);
  if (trends.length) again(holders.trends, showTrends, trends);
});
source.addEventListener("error", () => {
  if (source.readyState === EventSource.CLOSED && holders.life) document.getElementById("now").textContent = "the server has ended";
});
