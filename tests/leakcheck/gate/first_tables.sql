-- The tables as lowtide 0.1 made them first, by Alembic.
CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
CREATE TABLE runs (
    id INTEGER NOT NULL,
    "key" VARCHAR(64) NOT NULL,
    created DATETIME NOT NULL,
    "commit" VARCHAR(64) NOT NULL,
    hardware TEXT NOT NULL,
    driver TEXT NOT NULL,
    platform TEXT NOT NULL,
    python TEXT NOT NULL,
    torch TEXT NOT NULL,
    lowtide TEXT NOT NULL,
    command TEXT NOT NULL,
    CONSTRAINT pk_runs PRIMARY KEY (id),
    CONSTRAINT uq_runs_key UNIQUE ("key")
);
CREATE INDEX ix_runs_created ON runs (created);
CREATE TABLE subjects (
    id INTEGER NOT NULL,
    name TEXT NOT NULL,
    CONSTRAINT pk_subjects PRIMARY KEY (id),
    CONSTRAINT uq_subjects_name UNIQUE (name)
);
CREATE TABLE verdicts (
    run_id INTEGER NOT NULL,
    subject_id INTEGER NOT NULL,
    outcome VARCHAR(16) NOT NULL,
    CONSTRAINT pk_verdicts PRIMARY KEY (run_id, subject_id),
    CONSTRAINT fk_verdicts_run_id FOREIGN KEY(run_id) REFERENCES runs (id),
    CONSTRAINT fk_verdicts_subject_id FOREIGN KEY(subject_id) REFERENCES subjects (id)
);
CREATE TABLE series (
    id INTEGER NOT NULL,
    subject_id INTEGER NOT NULL,
    kind VARCHAR(16) NOT NULL,
    resource VARCHAR(32) NOT NULL,
    cause VARCHAR(32) NOT NULL,
    device VARCHAR(64) NOT NULL,
    fingerprint VARCHAR(64) NOT NULL,
    stage TEXT NOT NULL,
    CONSTRAINT pk_series PRIMARY KEY (id),
    CONSTRAINT uq_series_subject_id UNIQUE (subject_id, kind, resource, cause, device, stage, fingerprint),
    CONSTRAINT fk_series_subject_id FOREIGN KEY(subject_id) REFERENCES subjects (id)
);
CREATE TABLE residues (
    run_id INTEGER NOT NULL,
    series_id INTEGER NOT NULL,
    bytes BIGINT NOT NULL,
    count BIGINT NOT NULL,
    CONSTRAINT pk_residues PRIMARY KEY (run_id, series_id),
    CONSTRAINT fk_residues_run_id FOREIGN KEY(run_id) REFERENCES runs (id),
    CONSTRAINT fk_residues_series_id FOREIGN KEY(series_id) REFERENCES series (id)
);
CREATE INDEX ix_residues_series_id ON residues (series_id);
INSERT INTO alembic_version VALUES ('0001');
