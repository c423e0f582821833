package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// maxProofs is how often the same files are tested before they are deleted.
const maxProofs = 3

// failedProofFile is the name of the description in a directory with keptPrefix.
const failedProofFile = "kept.json"

// failedProof describes files that were made but have not passed their test yet.
type failedProof struct {
	Key    string   `json:"key"`
	Files  []string `json:"files"`
	Proofs int      `json:"proofs"` // number of failed tests
}

// fillProved is like fill, but also tests the result with Prove. If an earlier maker
// left files with the same key that still have to pass, it tests those instead of
// making new ones.
func (m *maker) fillProved(ctx context.Context, i Info, fill func(ctx context.Context, dir string) ([]string, error)) ([]string, error) {
	if m.o.Prove == nil {
		return m.makeAndFill(ctx, fill)
	}
	k, ok, err := m.takeFailedProof(i.Key)
	if err != nil {
		return nil, err
	}
	if !ok {
		if k.Files, err = m.makeAndFill(ctx, fill); err != nil {
			return nil, err
		}
	}
	if err := m.o.Prove(ctx, m.dir, k.Files); err != nil {
		return nil, errors.Join(err, m.keepForProof(ctx, k))
	}
	return k.Files, nil
}

func (m *maker) failedProofDir() string { return filepath.Join(m.store.Dir, keptPrefix+m.name) }

// takeFailedProof turns the files that an earlier maker kept into the work directory if they
// have the given key. Otherwise it removes them.
func (m *maker) takeFailedProof(key string) (failedProof, bool, error) {
	k := failedProof{Key: key}
	dir := m.failedProofDir()
	var have failedProof
	b, err := os.ReadFile(filepath.Join(dir, failedProofFile))
	if err != nil || json.Unmarshal(b, &have) != nil || have.Key != key || m.o.Again {
		return k, false, removeTree(dir)
	}
	if err := m.makeDir(); err != nil {
		return k, false, err
	}
	if err := errors.Join(os.Remove(m.dir), os.Rename(dir, m.dir)); err != nil {
		return k, false, fmt.Errorf("resume preserved build: %w", err)
	}
	m.report("already built, only testing it")
	return have, true, nil
}

// keepForProof leaves the work directory for the next maker, unless its test has failed too
// often. A cancelled test does not count.
func (m *maker) keepForProof(ctx context.Context, k failedProof) error {
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
	if err := os.WriteFile(filepath.Join(m.dir, failedProofFile), b, 0o600); err != nil {
		return fmt.Errorf("preserve build: %w", err)
	}
	if err := os.Rename(m.dir, m.failedProofDir()); err != nil {
		return fmt.Errorf("preserve build: %w", err)
	}
	m.dir, m.kept = "", true
	return nil
}
