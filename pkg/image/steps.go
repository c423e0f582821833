package image

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"path"
	"slices"
)

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
