// Charts of #charts, drawn by uPlot from the numbers in #data, two or three abreast where there is room. With [data-live] parts the
// page is asked for news every two seconds. What is zoomed into is in the URL, as #zoom=FROM,TO in steps or in Unix time.
"use strict";
(() => {
  const host = document.getElementById("charts");
  if (!host) return;
  const EVERY_MS = 2000, HEIGHT = 190, AXIS = 56, LANE = 26, LANE_AXIS = 190, LETTER = 7;
  // The moving mean is over a part of the curve, and there is none of a short one.
  const PART = 24, FEWEST = 16, PALE = "59";
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

  const axes = (chart, extra) => [
    {
      stroke: colour("--text"), grid: { stroke: colour("--line"), width: 1 },
      ...(chart.by === "time" ? { values: TIMES, space: 100 } : { space: 60, size: 34, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6] }),
    },
    { stroke: colour("--text"), grid: { stroke: colour("--line"), width: 1 }, size: AXIS, ...extra },
  ];

  const tick = (value) => value.toLocaleString("en-US", { maximumSignificantDigits: 6 });

  // The mean of the neighbours on both sides that the curve has, as many as the part says.
  const smoothed = (values) => {
    const known = values.flatMap((value, index) => (value == null ? [] : [index]));
    const reach = Math.ceil(known.length / PART);
    const result = values.map(() => null);
    known.forEach((place, number) => {
      const near = known.slice(Math.max(0, number - reach), number + reach + 1);
      result[place] = near.reduce((sum, index) => sum + values[index], 0) / near.length;
    });
    return known.length < FEWEST ? null : result;
  };

  const curve = (chart) => {
    const series = [], data = [chart.x];
    chart.curves.forEach((one, index) => {
      const stroke = colour(COLOURS[index % COLOURS.length]);
      const mean = one.kind === "points" ? null : smoothed(one.values);
      series.push({
        label: one.name, stroke: mean ? stroke + PALE : stroke, width: mean ? 1 : 1.5, spanGaps: true,
        points: { show: false }, value: (plot, value) => (value == null ? "-" : String(Number(value.toPrecision(4)))),
        ...(one.kind === "points" ? { paths: () => null, points: { show: true, size: 7, stroke, fill: stroke } } : {}),
      });
      data.push(one.values);
      if (!mean) return;
      series.push({ label: `${one.name}, moving mean`, class: "mean", stroke, width: 2, spanGaps: true, points: { show: false } });
      data.push(mean);
    });
    const markers = { stroke: (plot, index) => (plot.series[index].stroke?.(plot, index) ?? "").slice(0, 7) };
    return { series, data, axes: axes(chart, { values: (plot, splits) => splits.map(tick) }), scales: {}, height: HEIGHT, legend: { markers } };
  };

  // A lane is a stepped area of its own between `base` and `base + 0.85`.
  const lanes = (chart, width) => {
    const base = (index) => chart.curves.length - 1 - index;
    const size = Math.min(LANE_AXIS, Math.round(width / 3)), most = Math.floor(size / LETTER) - 1;
    return {
      series: chart.curves.map((one, index) => ({
        label: one.name, width: 0, fill: colour(`--${one.kind}`), fillTo: base(index), points: { show: false },
        paths: uPlot.paths.stepped({ align: 1 }),
        value: (plot, value) => (value == null ? "-" : `${Math.round((value - base(index)) / 0.0085)} %`),
      })),
      data: [chart.x, ...chart.curves.map((one, index) => one.values.map((share) => base(index) + 0.85 * share))],
      axes: axes(chart, {
        size, splits: chart.curves.map((one, index) => base(index) + 0.4), grid: { show: false },
        values: (plot, splits) => splits.map((at) => {
          const name = chart.curves[chart.curves.length - 1 - Math.round(at - 0.4)].name;
          return name.length > most ? `…${name.slice(-most)}` : name;
        }),
      }),
      scales: { y: { range: [0, chart.curves.length] } }, height: 60 + LANE * chart.curves.length, legend: { show: false },
    };
  };

  const draw = (chart) => {
    const section = document.createElement("section");
    const title = document.createElement("h3");
    title.textContent = chart.title;
    section.append(title);
    section.className = chart.lanes ? "chart whole" : "chart";
    host.append(section);
    const width = section.clientWidth;
    const { series, data, axes, scales, height, legend } = chart.lanes ? lanes(chart, width) : curve(chart);
    const x = chart.by === "time" ? { value: "{YYYY}-{MM}-{DD} {HH}:{mm}:{ss}" } : { label: "step" };
    plots.push(new uPlot({
      width, height, axes, scales: { x: { time: chart.by === "time" }, ...scales }, legend, series: [x, ...series],
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
  addEventListener("resize", () => plots.forEach((plot) => plot.setSize({ width: plot.root.parentElement.clientWidth, height: plot.height })));

  const parts = [...document.querySelectorAll("[data-live]")];
  if (!parts.length) return;
  let known = JSON.stringify(JSON.parse(document.getElementById("data").textContent)), held = false;
  const texts = new Map();
  addEventListener("pointerdown", () => { held = true; });
  addEventListener("pointerup", () => { held = false; });
  const renew = async (part) => {
    const answer = await fetch(part.dataset.live);
    const text = answer.ok ? await answer.text() : texts.get(part);
    if (text !== texts.get(part)) part.innerHTML = text;
    texts.set(part, text);
  };
  const look = async () => {
    const began = performance.now();
    if (!document.hidden) {
      try {
        const [charts] = await Promise.all([fetch(host.dataset.charts), ...parts.map(renew)]);
        const news = charts.ok ? await charts.json() : null;
        if (news && !held && JSON.stringify(news) !== known) {
          known = JSON.stringify(news);
          show(news);
        }
      } catch (error) {
        parts[0].textContent = "slipstream view does not answer any more; start it again.";
        texts.clear();
      }
    }
    setTimeout(look, Math.max(EVERY_MS, 10 * (performance.now() - began)));
  };
  look();
})();
