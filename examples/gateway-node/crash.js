// Dies where it is told to, once: `CRASH_AT=after_effect CRASH_ONCE=/tmp/crashed node orders.js 8081`.
//
// The file that CRASH_ONCE names is made at the crash; while it is there, nothing crashes any more.
'use strict';

const fs = require('node:fs');

/** True where it dies: now, or when `first` calls what it is given. */
function crashAt(point, first = (die) => die()) {
  if (process.env.CRASH_AT !== point) return false;
  try {
    fs.closeSync(fs.openSync(process.env.CRASH_ONCE, 'wx'));
  } catch (error) {
    if (error.code === 'EEXIST') return false;
    throw error;
  }
  first(() => process.kill(process.pid, 'SIGKILL'));
  return true;
}

module.exports = { crashAt };
