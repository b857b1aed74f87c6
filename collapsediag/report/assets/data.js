// Data of the page: decoded from its own blocks, or asked from the server of a live page.

const page = { runs: [], comparison: null, live: false };
const scoredCache = new Map();
const MAX_CACHED = 80;

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const letters = atob(base64);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

function inflated(base64) {
  const stream = new Blob([bytesOf(base64)]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new Response(stream);
}

const decoded = async id => JSON.parse(await (await inflated(byId(id).textContent)).text());

async function loadSeries() {
  if (typeof DecompressionStream === 'undefined') {
    throw new Error('this browser is too old to unpack the data (Chrome 80, Firefox 113 or Safari 16.4 is needed).');
  }
  Object.assign(page, await decoded('series'));
  page.runs.forEach(prepare);
}

async function fetched(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`the server answers ${path} with ${answer.status}`);
  return answer.json();
}

// What the page asks of a run again and again, found once.
function prepare(run, index) {
  run.index = index;
  run.letter = String.fromCharCode(65 + (index % 26));
  run.curves = new Map();
  run.indexOfStep = new Map(run.steps.map((step, i) => [step, i]));
  run.shownSteps = page.live ? run.scored_steps : run.scored_steps.filter(step => byId(`scored-${index}-${step}`));
}

// The steps at which a number was measured and its values there.
function curve(run, name) {
  let found = run.curves.get(name);
  if (!found) {
    const column = run.columns[name] ?? [];
    const kept = [];
    for (let i = 0; i < column.length; i++) if (column[i] !== null) kept.push(i);
    found = { x: Float64Array.from(kept, i => run.steps[i]), y: Float64Array.from(kept, i => column[i]) };
    run.curves.set(name, found);
  }
  return found;
}

// The value of a number at a step, null where it was not measured there.
function valueAt(run, name, step) {
  const index = run.indexOfStep.get(step);
  return index === undefined ? null : run.columns[name]?.[index] ?? null;
}

// A scored step of a run, unpacked: matrices as bytes.
function scoredStep(run, step) {
  const key = `${run.index}/${step}`;
  if (!scoredCache.has(key)) {
    if (scoredCache.size >= MAX_CACHED) scoredCache.delete(scoredCache.keys().next().value);
    const found = page.live ? fetched(`scored/${step}.json`) : decoded(`scored-${run.index}-${step}`);
    scoredCache.set(key, found.then(unpacked));
    scoredCache.get(key).catch(() => scoredCache.delete(key));
  }
  return scoredCache.get(key);
}

async function unpacked(scored) {
  for (const matrix of Object.values(scored.draws)) {
    if (matrix.pmi) {
      matrix.levels = new Uint8Array(await (await inflated(matrix.pmi)).arrayBuffer());
      matrix.rowIndex = new Map(matrix.rows.map((row, i) => [row, i]));
      delete matrix.pmi;
    }
  }
  return scored;
}

// Pointwise MI in nats of a cell, null where it was not scored.
function cell(matrix, index, column) {
  const level = matrix.levels[index * matrix.n_columns + column];
  return level === 0 ? null : ((level - 128) / 127) * matrix.range;
}
