"use strict";
// Draws the curves of the report with uPlot, and draws them anew if the width or the colours change.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const place = document.getElementById("charts");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const HEIGHT = 210;
  let drawn = [];

  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function duration(seconds) {
    const whole = Math.round(seconds), hours = Math.floor(whole / 3600);
    const rest = `${String(Math.floor(whole / 60) % 60).padStart(hours ? 2 : 1, "0")}:${String(whole % 60).padStart(2, "0")}`;
    return hours ? `${hours}:${rest}` : rest;
  }

  function number(value) {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
    return size > 0 && size < 0.001 ? value.toExponential(1) : String(+value.toPrecision(4));
  }

  // Vertical lines where the run was started again.
  function markStarts(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = colour("--c1");
    ctx.setLineDash([4, 4]);
    ctx.lineWidth = devicePixelRatio;
    for (const at of data.starts) {
      const x = plot.valToPos(at, "x", true);
      if (x >= bbox.left && x <= bbox.left + bbox.width) {
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
      }
    }
    ctx.restore();
  }

  function axis(more) {
    const line = { stroke: colour("--line"), width: 1 };
    return { stroke: colour("--muted"), grid: line, ticks: line, font: "11px system-ui, sans-serif", ...more };
  }

  function options(chart, width) {
    const byTime = chart.x === "time";
    const times = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 432000, 864000];
    const unit = chart.unit ? ` ${chart.unit}` : "";
    const curves = [], bands = [];
    for (const curve of chart.curves) {
      const stroke = colour(`--c${curve.colour % 8}`);
      curves.push({
        label: curve.label,
        stroke,
        width: curve.dashed ? 1.2 : 1.8,
        dash: curve.dashed ? [5, 4] : undefined,
        points: { show: curve.points.length < 30, size: 5, fill: stroke },
        value: (plot, value, at, index) => {
          if (value == null) return "–";
          const range = curve.least ? ` (${number(plot.data[at + 1][index])} … ${number(plot.data[at + 2][index])})` : "";
          return number(value) + unit + range;
        },
      });
      if (curve.least) {
        const edge = { stroke: "transparent", points: { show: false }, class: "range" };
        curves.push({ ...edge, label: "least" }, { ...edge, label: "most" });
        bands.push({ series: [curves.length, curves.length - 1], fill: `${stroke}33` });
      }
    }
    return {
      width,
      height: HEIGHT,
      cursor: { sync: byTime ? { key: "time" } : undefined, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: chart.zero ? { range: (_, low, high) => [0, chart.unit === "%" ? 105 : high * 1.1 || 1] } : {} },
      axes: [
        axis(byTime ? { incrs: times, values: (_, ticks) => ticks.map(duration) } : {}),
        axis({ size: 56, values: (_, ticks) => ticks.map(number) }),
      ],
      legend: { markers: { fill: (plot, at) => plot.series[at].stroke(), width: 0 } },
      bands,
      series: [{ label: { time: "Time", step: "Step", epoch: "Epoch", number: "Number" }[chart.x], value: (_, value) => (value == null ? "–" : byTime ? duration(value) : number(value)) }, ...curves],
      hooks: byTime ? { draw: [markStarts] } : {},
    };
  }

  function draw() {
    drawn.forEach(plot => plot.destroy());
    place.replaceChildren();
    const cards = data.charts.map(() => place.appendChild(document.createElement("div")));
    cards.forEach(card => (card.className = "chart"));  // all are there before the first is measured
    drawn = data.charts.map((chart, index) => {
      const card = cards[index];
      const title = card.appendChild(document.createElement("h2"));
      title.textContent = `${chart.title} `;
      const axes = [chart.unit, `by ${chart.x}`].filter(Boolean).join(", ");
      title.appendChild(document.createElement("small")).textContent = axes;
      const style = getComputedStyle(card);
      const width = card.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
      const lines = chart.curves.flatMap(curve => (curve.least ? [curve.points, curve.least, curve.most] : [curve.points]));
      const tables = lines.map(points => [points.map(point => point[0]), points.map(point => point[1])]);
      return new uPlot(options(chart, Math.max(width, 120)), uPlot.join(tables), card);
    });
    document.documentElement.dataset.charts = drawn.length;
  }

  let waiting, width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(draw, 150);
  });
  dark.addEventListener("change", draw);
  const onPaper = isOn => () => {
    document.documentElement.classList.toggle("paper", isOn);
    draw();
  };
  addEventListener("beforeprint", onPaper(true));
  addEventListener("afterprint", onPaper(false));
  draw();
})();
