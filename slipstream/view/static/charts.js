// Charts of the run page, drawn by uPlot from the numbers in #data; with #live the page is asked for news every two seconds. What is
// zoomed into is in the URL, as #zoom=FROM,TO in Unix time.
"use strict";
(() => {
  const host = document.getElementById("charts");
  if (!host) return;
  const EVERY_MS = 2000, HEIGHT = 200, AXIS = 190, LANE = 26, MOST_LABEL = 26;
  // Increment of the ticks in seconds, a tick, then what is said beside it in a new year, month, day, hour, minute, second.
  const DAY = "\n{YYYY}-{MM}-{DD}", MINUTE = `${DAY} {HH}:{mm}`;
  const TIMES = [
    [86400, "{YYYY}-{MM}-{DD}", null, null, null, null, null, null, 1],
    [60, "{HH}:{mm}", DAY, null, DAY, null, null, null, 1],
    [1, ":{ss}", MINUTE, null, MINUTE, null, MINUTE, null, 1],
    [0.001, ":{ss}.{fff}", MINUTE, null, MINUTE, null, MINUTE, null, 1],
  ];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const COLOURS = ["--curve-0", "--curve-1", "--curve-2", "--curve-3"];
  const plots = [];
  let whole = { min: 0, max: 0 };
  const asked = /^#zoom=([\d.]+),([\d.]+)$/.exec(location.hash);
  let zoomed = asked && { min: Number(asked[1]), max: Number(asked[2]) };
  let following = false;

  const follow = (plot) => {
    if (following || !plots.includes(plot)) return;
    const { min, max } = plot.scales.x;
    following = true;
    for (const other of plots) if (other !== plot) other.setScale("x", { min, max });
    following = false;
    zoomed = min > whole.min || max < whole.max ? { min, max } : null;
    history.replaceState(null, "", zoomed ? `#zoom=${min},${max}` : location.pathname + location.search);
  };

  const axes = (extra) => [
    { stroke: colour("--text"), grid: { stroke: colour("--line"), width: 1 }, values: TIMES },
    { stroke: colour("--text"), grid: { stroke: colour("--line"), width: 1 }, size: AXIS, ...extra },
  ];

  const curve = (chart) => ({
    series: chart.curves.map((one, index) => ({
      label: one.name, stroke: colour(COLOURS[index % COLOURS.length]), width: 1.5, spanGaps: true,
      ...(one.kind === "points" ? { paths: () => null, points: { show: true, size: 7 } } : {}),
    })),
    data: [chart.x, ...chart.curves.map((one) => one.values)], axes: axes({}), scales: {}, height: HEIGHT, legend: {},
  });

  // A lane is a stepped area of its own between `base` and `base + 0.85`.
  const lanes = (chart) => {
    const base = (index) => chart.curves.length - 1 - index;
    return {
      series: chart.curves.map((one, index) => ({
        label: one.name, width: 0, fill: colour(`--${one.kind}`), fillTo: base(index), points: { show: false },
        paths: uPlot.paths.stepped({ align: 1 }),
        value: (plot, value) => (value == null ? "-" : `${Math.round((value - base(index)) / 0.0085)} %`),
      })),
      data: [chart.x, ...chart.curves.map((one, index) => one.values.map((share) => base(index) + 0.85 * share))],
      axes: axes({
        splits: chart.curves.map((one, index) => base(index) + 0.4), grid: { show: false },
        values: (plot, splits) => splits.map((at) => {
          const name = chart.curves[chart.curves.length - 1 - Math.round(at - 0.4)].name;
          return name.length > MOST_LABEL ? `…${name.slice(-MOST_LABEL)}` : name;
        }),
      }),
      scales: { y: { range: [0, chart.curves.length] } }, height: 60 + LANE * chart.curves.length, legend: { show: false },
    };
  };

  const draw = (chart) => {
    const { series, data, axes, scales, height, legend } = (chart.lanes ? lanes : curve)(chart);
    const section = document.createElement("section");
    const title = document.createElement("h2");
    title.textContent = chart.title;
    section.append(title);
    host.append(section);
    plots.push(new uPlot({
      width: host.clientWidth, height, axes, scales, legend, series: [{ value: "{YYYY}-{MM}-{DD} {HH}:{mm}:{ss}" }, ...series],
      cursor: { sync: { key: "run", scales: ["x", null] } }, hooks: { setScale: [(plot, key) => key === "x" && follow(plot)] },
    }, data, section));
  };

  const show = (charts) => {
    for (const plot of plots.splice(0)) plot.destroy();
    host.replaceChildren();
    whole = { min: Math.min(...charts.map((chart) => chart.x[0])), max: Math.max(...charts.map((chart) => chart.x.at(-1))) };
    charts.forEach(draw);
    if (plots.length) plots[0].setScale("x", zoomed || whole);
    document.documentElement.dataset.drawn = String(plots.length);
  };

  show(JSON.parse(document.getElementById("data").textContent));
  addEventListener("resize", () => plots.forEach((plot) => plot.setSize({ width: host.clientWidth, height: plot.height })));

  const live = document.getElementById("live");
  if (!live.dataset.live) return;
  let known = JSON.stringify(JSON.parse(document.getElementById("data").textContent)), held = false;
  addEventListener("pointerdown", () => { held = true; });
  addEventListener("pointerup", () => { held = false; });
  const look = async () => {
    const began = performance.now();
    if (!document.hidden) {
      try {
        const [now, charts] = await Promise.all([fetch(live.dataset.live), fetch(host.dataset.charts)]);
        if (now.ok) live.innerHTML = await now.text();
        const news = charts.ok ? await charts.json() : null;
        if (news && !held && JSON.stringify(news) !== known) {
          known = JSON.stringify(news);
          show(news);
        }
      } catch (error) {
        live.textContent = "slipstream view does not answer any more; start it again.";
      }
    }
    setTimeout(look, Math.max(EVERY_MS, 10 * (performance.now() - began)));
  };
  look();
})();
