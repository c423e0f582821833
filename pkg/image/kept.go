package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// maxProofs is how often the same files are proved before they are thrown away.
const maxProofs = 3

// keptFile is in a directory of keptPrefix.
const keptFile = "kept.json"

// kept is what is known of files that were made and not proved.
type kept struct {
	Key    string   `json:"key"`
	Files  []string `json:"files"`
	Proofs int      `json:"proofs"` // that have failed
}

// fillProved is fill, and what fill has made is proved. An earlier maker may have
// left something of the same key to be proved: then it is not made again.
func (m *maker) fillProved(ctx context.Context, i Info, fill func(ctx context.Context, dir string) ([]string, error)) ([]string, error) {
	if m.o.Prove == nil {
		return m.fill(ctx, fill)
	}
	k, ok, err := m.takeKept(i.Key)
	if err != nil {
		return nil, err
	}
	if !ok {
		if k.Files, err = m.fill(ctx, fill); err != nil {
			return nil, err
		}
	}
	if err := m.o.Prove(ctx, m.dir, k.Files); err != nil {
		return nil, errors.Join(err, m.keep(ctx, k))
	}
	return k.Files, nil
}

func (m *maker) keptDir() string { return filepath.Join(m.store.Dir, keptPrefix+m.name) }

// takeKept makes what an earlier maker has kept the work directory, if it is of a
// key, and removes it otherwise.
func (m *maker) takeKept(key string) (kept, bool, error) {
	k := kept{Key: key}
	dir := m.keptDir()
	var have kept
	b, err := os.ReadFile(filepath.Join(dir, keptFile))
	if err != nil || json.Unmarshal(b, &have) != nil || have.Key != key || m.o.Again {
		return k, false, removeTree(dir)
	}
	if err := m.makeDir(); err != nil {
		return k, false, err
	}
	if err := errors.Join(os.Remove(m.dir), os.Rename(dir, m.dir)); err != nil {
		return k, false, fmt.Errorf("take what was kept: %w", err)
	}
	m.say("built already, to be proved")
	return have, true, nil
}

// keep leaves the work directory to the next maker, unless it has failed too
// often. A proof that was cancelled does not count.
func (m *maker) keep(ctx context.Context, k kept) error {
	if ctx.Err() == nil {
		k.Proofs++
	}
	if k.Proofs >= maxProofs {
		return nil // end removes it
	}
	b, err := json.Marshal(k)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(m.dir, keptFile), b, 0o600); err != nil {
		return fmt.Errorf("keep what was built: %w", err)
	}
	if err := os.Rename(m.dir, m.keptDir()); err != nil {
		return fmt.Errorf("keep what was built: %w", err)
	}
	m.dir, m.kept = "", true
	return nil
}
