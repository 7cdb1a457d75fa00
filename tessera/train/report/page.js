// Hands each figure to Plotly in the colors of the page, keeps a reader's zoom over
// reloads, and zooms by keys, which Plotly does not.
"use strict";
const charts = [...document.querySelectorAll(".chart")];
const dark = matchMedia("(prefers-color-scheme: dark)");
const LIGHT = ["#0060a8", "#b34700", "#00704f", "#8f3d78", "#6b5900", "#a4262c",
  "#4b4fbf", "#3f5b66", "#7a4a2b", "#2e6b1f"];
const DARK = ["#6cb8f5", "#ff9d5c", "#3ecf9e", "#e79fce", "#e0c94f", "#ff8f8f",
  "#a9acff", "#a9c2cc", "#dba784", "#93d67f"];

function themed(layout, isDark) {
  const style = getComputedStyle(document.body);
  const [ink, line] = isDark ? ["#e6edf3", "#3d444d"] : ["#1f2328", "#d1d9e0"];
  const axis = (own) => ({...own, gridcolor: line, zerolinecolor: line, linecolor: ink,
    automargin: true});
  return {
    height: 352, ...layout, xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
    colorway: isDark ? DARK : LIGHT, paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)", font: {color: ink, family: style.fontFamily},
    hoverlabel: {bgcolor: isDark ? "#161b22" : "#ffffff", font: {color: ink}},
    margin: {l: 48, r: 12, t: 40, b: 56},
    legend: {orientation: "h", traceorder: "normal", x: 0, y: 1.02, yanchor: "bottom"},
    dragmode: "zoom",
  };
}

const key = (index) => `zoom ${location.pathname} ${index}`;
const stored = (name) => { try { return sessionStorage.getItem(name); } catch { return null; } };
const store = (name, value) => { try { sessionStorage.setItem(name, value); } catch {} };

function draw(chart, index, isDark) {
  const figure = JSON.parse(chart.parentElement.querySelector("script.figure").textContent);
  const layout = themed(figure.layout, isDark);
  const zoom = JSON.parse(stored(key(index)) || "{}");
  for (const name of ["xaxis", "yaxis"]) {
    if (zoom[name]) layout[name] = {...layout[name], range: zoom[name], autorange: false};
  }
  const options = {responsive: true, displaylogo: false};
  return Plotly.react(chart, figure.data, layout, options);
}

function remember(chart, index) {
  const zoom = {};
  for (const name of ["xaxis", "yaxis"]) {
    const axis = chart._fullLayout[name];
    if (!axis.autorange) zoom[name] = axis.range;
  }
  store(key(index), JSON.stringify(zoom));
}

function move(chart, event) {
  const axis = chart._fullLayout.xaxis;
  const [left, right] = axis.range.map((end) => axis.r2l(end));
  const size = right - left;
  const ends = {
    "+": [left + size / 4, right - size / 4], "-": [left - size / 2, right + size / 2],
    ArrowLeft: [left - size / 4, right - size / 4],
    ArrowRight: [left + size / 4, right + size / 4],
  }[event.key];
  if (event.key === "0") Plotly.relayout(chart, {"xaxis.autorange": true, "yaxis.autorange": true});
  else if (ends) Plotly.relayout(chart, {"xaxis.range": ends.map((end) => axis.l2r(end))});
  else return;
  event.preventDefault();
}

charts.forEach((chart, index) => {
  draw(chart, index, dark.matches);
  chart.on("plotly_relayout", () => remember(chart, index));
  chart.addEventListener("keydown", (event) => move(chart, event));
});
dark.addEventListener("change", () => charts.forEach((c, i) => draw(c, i, dark.matches)));
addEventListener("beforeprint", () => {
  document.querySelectorAll("details:not(.sample)").forEach((each) => { each.open = true; });
  charts.forEach((chart, index) => draw(chart, index, false));
});
addEventListener("afterprint", () => charts.forEach((c, i) => draw(c, i, dark.matches)));

// Completions: by their texts and rewards. A reward that is missing is NaN, which is in
// no range and last in every order.
document.querySelectorAll(".browser").forEach((browser) => {
  const [words, from, to, order] = browser.querySelectorAll("input, select");
  const list = browser.querySelector(".scroll"), samples = [...list.children];
  const textOf = (one) => [...one.querySelectorAll("pre")].map((p) => p.textContent).join("\n");
  const texts = new Map(samples.map((one) => [one, textOf(one).toLowerCase()]));
  const show = () => {
    const wanted = words.value.toLowerCase();
    for (const one of samples) {
      const reward = Number(one.dataset.reward);
      one.hidden = !texts.get(one).includes(wanted)
        || (from.value !== "" && !(reward >= from.valueAsNumber))
        || (to.value !== "" && !(reward <= to.valueAsNumber));
    }
    const found = samples.filter((one) => !one.hidden).length;
    browser.querySelector("output").textContent = `${found} of ${samples.length}`;
  };
  const sort = () => {
    const name = order.value.replace("-", ""), sign = order.value === name ? 1 : -1;
    const place = (one) => {
      const value = Number(one.dataset[name]);
      return Number.isNaN(value) ? Infinity : sign * value;
    };
    list.append(...[...samples].sort((a, b) => place(a) - place(b) || 0));
  };
  [words, from, to].forEach((each) => each.addEventListener("input", show));
  order.addEventListener("change", sort);
  browser.querySelector(".filter").hidden = false;
  show();
});

document.documentElement.dataset.drawn = charts.length;
