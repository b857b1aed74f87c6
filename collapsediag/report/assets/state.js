// What the reader has chosen. Everything that is drawn listens to some of it; the address keeps what can be shared.

const state = {
  run: 0,
  step: null,
  trace: null,
  draw: null,
  zoom: null,
  hover: null,
  hidden: new Set(),
  measure: null,
  missed: false,
  environment: '',
  rewardFrom: null,
  rewardTo: null,
  search: '',
};
const listeners = [];

// Call `listener` whenever one of these changes.
const on = (keys, listener) => listeners.push({ keys: new Set(keys), listener });

function update(changes) {
  const changed = Object.keys(changes).filter(key => state[key] !== changes[key]);
  if (!changed.length) return;
  Object.assign(state, changes);
  for (const { keys, listener } of listeners) if (changed.some(key => keys.has(key))) listener();
  if (changed.some(key => ['run', 'step', 'trace', 'draw', 'zoom'].includes(key))) keepAddress();
}

const run = () => page.runs[state.run];
const shownRuns = () => page.runs.filter(one => !state.hidden.has(one.index));
const isComparing = () => page.runs.length > 1;

function nearestStep(steps, step) {
  return steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best), steps[0] ?? null);
}

function stepRange() {
  let low = Infinity;
  let high = -Infinity;
  for (const one of shownRuns()) {
    low = Math.min(low, one.steps[0]);
    high = Math.max(high, one.steps[one.steps.length - 1]);
  }
  return low > high ? [0, 1] : [low, high];
}

const stepWindow = () => state.zoom ?? stepRange();

function moveStep(by) {
  const steps = run().shownSteps;
  const index = clamp(steps.indexOf(state.step) + by, 0, steps.length - 1);
  if (steps.length) update({ step: steps[index] });
}

function keepAddress() {
  const parts = [];
  if (state.run) parts.push(`run=${state.run + 1}`);
  if (state.step !== null) parts.push(`step=${state.step}`);
  if (state.trace !== null) parts.push(`trace=${state.trace}`);
  if (state.draw !== null && state.draw !== Object.keys(run().draws)[0]) parts.push(`draw=${state.draw}`);
  if (state.zoom) parts.push(`zoom=${state.zoom.map(Math.round).join('-')}`);
  history.replaceState(null, '', '#' + parts.join('&'));
}

// The state that an address asks for, as far as this page has it.
function fromAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const whole = name => (/^\d{1,12}$/.test(asked.get(name) ?? '') ? Number(asked.get(name)) : null);
  const index = clamp((whole('run') ?? 1) - 1, 0, page.runs.length - 1);
  const chosen = page.runs[index];
  const steps = chosen.shownSteps;
  const zoom = /^(\d{1,12})-(\d{1,12})$/.exec(asked.get('zoom') ?? '');
  return {
    run: index,
    draw: Object.hasOwn(chosen.draws, asked.get('draw') ?? '') ? asked.get('draw') : Object.keys(chosen.draws)[0],
    step: nearestStep(steps, whole('step') ?? steps[steps.length - 1]),
    trace: whole('trace'),
    zoom: zoom && Number(zoom[1]) < Number(zoom[2]) ? [Number(zoom[1]), Number(zoom[2])] : null,
  };
}
