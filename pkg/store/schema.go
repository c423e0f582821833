package store

// schema lists the statements that build the database. It only ever grows: a released
// statement must not change, and a new version appends one. The pragma user_version
// counts the statements that were applied.
var schema = []string{
	`CREATE TABLE sessions (
		id               TEXT PRIMARY KEY,
		name             TEXT NOT NULL UNIQUE,
		repo_key         TEXT NOT NULL,
		repo             TEXT NOT NULL,
		phase            TEXT NOT NULL,
		desired          TEXT NOT NULL,
		created_at       INTEGER NOT NULL,
		state_changed_at INTEGER NOT NULL,
		error_code       TEXT NOT NULL DEFAULT '',
		error_message    TEXT NOT NULL DEFAULT '',
		error_hint       TEXT NOT NULL DEFAULT '',
		spec             TEXT NOT NULL,
		status           TEXT NOT NULL DEFAULT '{}',
		token_sha256     TEXT NOT NULL DEFAULT ''
	) STRICT;
	CREATE UNIQUE INDEX one_session_per_repo ON sessions(repo_key) WHERE phase <> 'gone';
	CREATE TABLE events (
		session TEXT NOT NULL REFERENCES sessions(id),
		seq     INTEGER NOT NULL,
		at      INTEGER NOT NULL,
		kind    TEXT NOT NULL,
		data    TEXT NOT NULL,
		PRIMARY KEY (session, seq)
	) STRICT, WITHOUT ROWID;`,

	// Tasks, and sessions that belong to them. From here on an event can belong to
	// either: its subject is an id, and both kinds of ids are random, so that no two
	// are equal.
	//
	// num is the order in which tasks were created, independent of the clock. SQLite
	// puts the rowid at the end of every index, so each of these indexes answers "the
	// newest 50" without sorting. The manifest, the one column that may be large, is
	// last: the columns before it can be read without it.
	`ALTER TABLE sessions ADD COLUMN task TEXT NOT NULL DEFAULT '';
	DROP INDEX one_session_per_repo;
	CREATE UNIQUE INDEX one_session_per_repo ON sessions(repo_key) WHERE task = '' AND phase <> 'gone';
	CREATE UNIQUE INDEX one_session_per_task ON sessions(task) WHERE task <> '' AND phase <> 'gone';
	CREATE INDEX sessions_that_exist ON sessions(created_at, id) WHERE phase <> 'gone';

	ALTER TABLE events RENAME TO events_of_sessions;
	CREATE TABLE events (
		subject TEXT NOT NULL,
		seq     INTEGER NOT NULL,
		at      INTEGER NOT NULL,
		kind    TEXT NOT NULL,
		data    TEXT NOT NULL,
		PRIMARY KEY (subject, seq)
	) STRICT, WITHOUT ROWID;
	INSERT INTO events (subject, seq, at, kind, data) SELECT session, seq, at, kind, data FROM events_of_sessions;
	DROP TABLE events_of_sessions;

	CREATE TABLE tasks (
		num              INTEGER PRIMARY KEY,
		id               TEXT NOT NULL,
		name             TEXT NOT NULL,
		phase            TEXT NOT NULL,
		desired          TEXT NOT NULL,
		priority         INTEGER NOT NULL,
		session          TEXT NOT NULL,
		created_at       INTEGER NOT NULL,
		state_changed_at INTEGER NOT NULL,
		error_code       TEXT NOT NULL DEFAULT '',
		error_message    TEXT NOT NULL DEFAULT '',
		error_hint       TEXT NOT NULL DEFAULT '',
		labels           TEXT NOT NULL,
		status           TEXT NOT NULL,
		manifest         TEXT NOT NULL
	) STRICT;
	CREATE UNIQUE INDEX tasks_by_id ON tasks(id);
	CREATE INDEX tasks_by_phase ON tasks(phase);
	CREATE INDEX tasks_by_name ON tasks(name);
	CREATE INDEX task_queue ON tasks(phase, priority DESC);
	CREATE TABLE task_labels (
		key   TEXT NOT NULL,
		value TEXT NOT NULL,
		task  INTEGER NOT NULL,
		PRIMARY KEY (key, value, task)
	) STRICT, WITHOUT ROWID;`,

	// The submitted text as it was written, for users; it is read only on request. It
	// is stored here instead of in a file because accepted text must survive a power
	// cut, and one wait for the disk is enough.
	`CREATE TABLE task_texts (
		task TEXT PRIMARY KEY,
		text BLOB NOT NULL
	) STRICT, WITHOUT ROWID;`,

	// Requests that a client may repeat. num is the order of their arrival.
	`CREATE TABLE requests (
		num     INTEGER PRIMARY KEY,
		actor   TEXT NOT NULL,
		key     TEXT NOT NULL,
		digest  TEXT NOT NULL,
		subject TEXT NOT NULL,
		notes   TEXT NOT NULL,
		at      INTEGER NOT NULL
	) STRICT;
	CREATE UNIQUE INDEX requests_by_key ON requests(actor, key);
	CREATE INDEX requests_of_actor ON requests(actor, num);
	CREATE INDEX requests_by_time ON requests(at);`,

	// What was used of models. Rows are only added, and settled once.
	`CREATE TABLE usage (
		session        TEXT NOT NULL,
		request        TEXT NOT NULL,
		at             INTEGER NOT NULL,
		repo_key       TEXT NOT NULL,
		task           TEXT NOT NULL,
		model          TEXT NOT NULL,
		input          INTEGER NOT NULL,
		cache_read     INTEGER NOT NULL,
		cache_write    INTEGER NOT NULL,
		cache_write_1h INTEGER NOT NULL,
		output         INTEGER NOT NULL,
		tokens         INTEGER NOT NULL,
		cost           INTEGER NOT NULL,
		settled        INTEGER NOT NULL,
		PRIMARY KEY (session, request)
	) STRICT, WITHOUT ROWID;
	CREATE INDEX usage_by_time ON usage(at);
	CREATE INDEX usage_by_task ON usage(task) WHERE task <> '';`,

	// What waits for a person's answer. num is the order in which they were asked.
	`CREATE TABLE questions (
		num         INTEGER PRIMARY KEY,
		id          TEXT NOT NULL,
		session     TEXT NOT NULL REFERENCES sessions(id),
		guest_id    TEXT NOT NULL,
		kind        TEXT NOT NULL,
		agent       TEXT NOT NULL,
		tool        TEXT NOT NULL,
		text        TEXT NOT NULL,
		choices     TEXT NOT NULL,
		only        INTEGER NOT NULL,
		parts       INTEGER NOT NULL,
		state       TEXT NOT NULL,
		asked_at    INTEGER NOT NULL,
		deadline    INTEGER NOT NULL,
		preset      TEXT NOT NULL,
		answer      TEXT NOT NULL,
		by          TEXT NOT NULL,
		answered_at INTEGER NOT NULL
	) STRICT;
	CREATE UNIQUE INDEX questions_by_id ON questions(id);
	CREATE UNIQUE INDEX questions_by_guest_id ON questions(session, guest_id);
	CREATE INDEX questions_that_wait ON questions(num) WHERE state IN ('open', 'answered');`,

	// Subtasks. parent and root are ids of tasks or sessions. tree holds the ids of the
	// tasks or sessions above a use of a model, from the root on, each followed by a slash.
	`ALTER TABLE tasks ADD COLUMN parent TEXT NOT NULL DEFAULT '';
	ALTER TABLE tasks ADD COLUMN root TEXT NOT NULL DEFAULT '';
	ALTER TABLE tasks ADD COLUMN depth INTEGER NOT NULL DEFAULT 0;
	CREATE INDEX tasks_by_root ON tasks(root) WHERE root <> '';
	CREATE INDEX subtask_queue ON tasks(phase, priority DESC) WHERE parent <> '';
	ALTER TABLE usage ADD COLUMN tree TEXT NOT NULL DEFAULT '';
	UPDATE usage SET tree = CASE task WHEN '' THEN session ELSE task END || '/';
	CREATE INDEX usage_by_tree ON usage(tree);`,

	// Several sessions of one repository, each with its own label.
	`ALTER TABLE sessions ADD COLUMN label TEXT NOT NULL DEFAULT '';
	UPDATE sessions SET label = COALESCE(json_extract(spec, '$.repo.branch'), '') WHERE task = '';
	DROP INDEX one_session_per_repo;
	CREATE UNIQUE INDEX one_session_per_label ON sessions(repo_key, label) WHERE task = '' AND phase <> 'gone';`,

	// A cluster. host is the host that has a task: '' for this one, '*' for none yet. In
	// cluster_host, until is in nanoseconds since the boot of that id, and position is how far this
	// host has read the cluster's log of tasks.
	`ALTER TABLE tasks ADD COLUMN host TEXT NOT NULL DEFAULT '';
	DROP INDEX task_queue;
	DROP INDEX subtask_queue;
	CREATE INDEX task_queue ON tasks(phase, priority DESC) WHERE host = '';
	CREATE INDEX subtask_queue ON tasks(phase, priority DESC) WHERE parent <> '' AND host = '';
	CREATE INDEX tasks_here ON tasks(phase) WHERE host = '';
	CREATE TABLE cluster_tasks (
		task     TEXT PRIMARY KEY,
		fence    INTEGER NOT NULL,
		revision INTEGER NOT NULL,
		shipped  INTEGER NOT NULL,
		settled  INTEGER NOT NULL,
		files    TEXT NOT NULL DEFAULT ''
	) STRICT, WITHOUT ROWID;
	CREATE INDEX cluster_work ON cluster_tasks(task) WHERE settled = 0;
	CREATE TABLE cluster_wishes (
		task    TEXT PRIMARY KEY,
		desired TEXT NOT NULL
	) STRICT, WITHOUT ROWID;
	CREATE TABLE cluster_host (
		one         INTEGER PRIMARY KEY CHECK (one = 1),
		incarnation TEXT NOT NULL,
		boot        TEXT NOT NULL DEFAULT '',
		until       INTEGER NOT NULL DEFAULT 0,
		position    INTEGER NOT NULL DEFAULT 0
	) STRICT;`,

	// Whether a user of this host submitted the task.
	`ALTER TABLE cluster_tasks ADD COLUMN submitted INTEGER NOT NULL DEFAULT 0;`,
}
