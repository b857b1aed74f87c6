// From numbers to paths: what lies in the window, thinned to what pixels can show, with gaps where nothing was measured.

// First index with x[index] >= value.
function lowerBound(x, value) {
  let low = 0;
  let high = x.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The part of a curve inside the window and one point on either side of it, so that lines reach the edge.
function inside({ x, y }, [low, high]) {
  const from = Math.max(0, lowerBound(x, low) - 1);
  const to = Math.min(x.length, lowerBound(x, high + 1e-9) + 1);
  return { x: x.subarray(from, to), y: y.subarray(from, to) };
}

function extent(values, found = [Infinity, -Infinity]) {
  for (const value of values) {
    if (value < found[0]) found[0] = value;
    if (value > found[1]) found[1] = value;
  }
  return found;
}

const median = sorted => (sorted.length % 2 ? sorted[sorted.length >> 1] : (sorted[sorted.length / 2 - 1] + sorted[sorted.length / 2]) / 2);

// One point for each column of pixels: its median, lowest and highest value.
function columnsOf({ x, y }, toX) {
  const found = { x: [], y: [], low: [], high: [] };
  let start = 0;
  while (start < x.length) {
    const column = Math.floor(toX(x[start]) / 2);
    let end = start + 1;
    while (end < x.length && Math.floor(toX(x[end]) / 2) === column) end++;
    const sorted = y.slice(start, end).sort();
    found.x.push(x[(start + end - 1) >> 1]);
    found.y.push(median(sorted));
    found.low.push(sorted[0]);
    found.high.push(sorted[sorted.length - 1]);
    start = end;
  }
  return found;
}

// A curve ready to draw. Where more than one value falls on two pixels, the line is their median and `low`, `high` their
// range; `isDense` says so.
function drawable(points, toX, width) {
  const part = inside(points, stepWindow());
  if (part.x.length <= width / 2) return { ...part, isDense: false };
  return { ...columnsOf(part, toX), isDense: true };
}

// Indices at which a line begins anew: after a silence of more than three times the usual distance.
function breaks(x) {
  if (x.length < 4) return new Set();
  const distances = Float64Array.from({ length: x.length - 1 }, (_, i) => x[i + 1] - x[i]);
  const usual = median(distances.slice().sort());
  const found = new Set();
  distances.forEach((distance, i) => distance > 3 * usual && found.add(i + 1));
  return found;
}

const point = (x, y) => `${x.toFixed(1)} ${y.toFixed(1)}`;

function linePath(x, y, toX, toY) {
  const starts = breaks(x);
  let path = '';
  for (let i = 0; i < x.length; i++) path += (i === 0 || starts.has(i) ? 'M' : 'L') + point(toX(x[i]), toY(y[i]));
  return path;
}

// The area between two lines over the same steps.
function areaPath(x, low, high, toX, toY) {
  const starts = [0, ...breaks(x), x.length];
  let path = '';
  for (let part = 0; part + 1 < starts.length; part++) {
    const [from, to] = [starts[part], starts[part + 1]];
    if (to - from < 2) continue;
    for (let i = from; i < to; i++) path += (i === from ? 'M' : 'L') + point(toX(x[i]), toY(high[i]));
    for (let i = to - 1; i >= from; i--) path += 'L' + point(toX(x[i]), toY(low[i]));
    path += 'Z';
  }
  return path;
}

// Two curves at the steps that both have, thinned like lines.
function between(lowCurve, highCurve, toX, width) {
  const joint = { x: [], low: [], high: [] };
  const at = new Map();
  highCurve.x.forEach((x, i) => at.set(x, highCurve.y[i]));
  lowCurve.x.forEach((x, i) => at.has(x) && (joint.x.push(x), joint.low.push(lowCurve.y[i]), joint.high.push(at.get(x))));
  const x = Float64Array.from(joint.x);
  const low = drawable({ x, y: Float64Array.from(joint.low) }, toX, width);
  const high = drawable({ x, y: Float64Array.from(joint.high) }, toX, width);
  return { x: low.x, low: low.y, high: high.y };
}

// Moves labels apart so that none covers another; `labels` have y and are returned from top to bottom.
function spread(labels, distance, low, high) {
  labels.sort((a, b) => a.y - b.y);
  labels.forEach((label, i) => (label.y = Math.max(label.y, i ? labels[i - 1].y + distance : low)));
  for (let i = labels.length - 1; i >= 0; i--) {
    labels[i].y = Math.min(labels[i].y, i === labels.length - 1 ? high : labels[i + 1].y - distance);
  }
  return labels;
}
