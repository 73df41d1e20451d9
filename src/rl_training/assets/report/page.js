"use strict";
// Shows the figures under the pointer; without it the page lacks nothing else.
(() => {
  const tip = document.getElementById("tip");
  const short = (v) => Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : Number(v.toPrecision(4)).toString();
  const nearest = (points, x) => points.reduce((a, b) => Math.abs(b[1] - x) < Math.abs(a[1] - x) ? b : a);
  const show = (chart, series, event) => {
    const box = chart.getBoundingClientRect();
    const x = (event.clientX - box.left) * chart.viewBox.baseVal.width / box.width;
    const found = series.filter((s) => s.points.length).map((s) => [s, nearest(s.points, x)]);
    if (!found.length) return;
    const near = found.reduce((a, b) => Math.abs(b[1][1] - x) < Math.abs(a[1][1] - x) ? b : a)[1];
    const cursor = chart.querySelector(".cursor");
    cursor.setAttribute("x1", near[1]);
    cursor.setAttribute("x2", near[1]);
    cursor.style.visibility = "visible";
    tip.replaceChildren();
    tip.append("step " + short(near[0]));
    for (const [s, p] of found) {
      const row = document.createElement("div");
      row.className = "c" + s.color;
      const band = s.band[String(p[0])];
      const text = s.label + ": " + short(p[2]) + (band ? " [" + short(band[0]) + ", " + short(band[1]) + "]" : "");
      row.append(document.createElement("i"), p[0] === near[0] ? text : text + " at " + short(p[0]));
      tip.append(row);
    }
    tip.hidden = false;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = Math.max(8, event.clientY - tip.offsetHeight - 14) + "px";
  };
  for (const chart of document.querySelectorAll("svg[data-chart]")) {
    const series = JSON.parse(chart.dataset.chart);
    chart.addEventListener("pointermove", (event) => show(chart, series, event));
    chart.addEventListener("pointerleave", () => {
      tip.hidden = true;
      chart.querySelector(".cursor").style.visibility = "hidden";
    });
  }
})();
