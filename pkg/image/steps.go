package image

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"
)

// Step is one provision script and the hash that its stamp in the guest holds after it
// ran.
type Step struct {
	Name string // such as "20-docker"
	Hash string // hex SHA-256
}

var stepFile = regexp.MustCompile(`^[0-9][0-9]-[a-z0-9-]+\.sh$`)

// Steps lists the provision scripts of fsys, whose root is provision/, in the order in
// which they run. The hash is the one that provision/run.sh computes: SHA-256 over the
// lines "SHA256  PATH" of the script, lib.sh, versions.env and everything in files/,
// sorted by path.
func Steps(fsys fs.FS) ([]Step, error) {
	entries, err := fs.ReadDir(fsys, ".")
	if err != nil {
		return nil, fmt.Errorf("list provision steps: %w", err)
	}
	shared := []string{"lib.sh", "versions.env"}
	err = fs.WalkDir(fsys, "files", func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			shared = append(shared, p)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list provision files: %w", err)
	}
	var steps []Step
	for _, e := range entries {
		if !stepFile.MatchString(e.Name()) {
			continue
		}
		h, err := hashFiles(fsys, append([]string{e.Name()}, shared...))
		if err != nil {
			return nil, err
		}
		steps = append(steps, Step{Name: strings.TrimSuffix(e.Name(), ".sh"), Hash: h})
	}
	if len(steps) == 0 {
		return nil, fmt.Errorf("no provision steps (NN-name.sh) found")
	}
	return steps, nil
}

// hashFiles computes `sha256sum PATHS | sha256sum` with the paths in byte order.
func hashFiles(fsys fs.FS, paths []string) (string, error) {
	paths = slices.Clone(paths)
	slices.Sort(paths)
	all := sha256.New()
	for _, p := range paths {
		b, err := fs.ReadFile(fsys, p)
		if err != nil {
			return "", fmt.Errorf("hash provision step: %w", err)
		}
		fmt.Fprintf(all, "%x  %s\n", sha256.Sum256(b), p)
	}
	return hex.EncodeToString(all.Sum(nil)), nil
}

// hashTree returns the hash of every regular file of fsys, including names, outside the
// directory but.
func hashTree(fsys fs.FS, but string) (string, error) {
	var paths []string
	err := fs.WalkDir(fsys, ".", func(p string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case p == but:
			return fs.SkipDir
		case d.Type().IsRegular():
			paths = append(paths, path.Clean(p))
		}
		return nil
	})
	if err != nil {
		return "", fmt.Errorf("hash provision files: %w", err)
	}
	return hashFiles(fsys, paths)
}
