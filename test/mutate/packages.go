package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// Package is a package whose tests are measured, with the mutants of its files.
type Package struct {
	Path    string // import path
	Dir     string
	Files   []string // base names, without test files
	Mutants []*Mutant

	baseline time.Duration
	flags    []string // for go test -c
}

// load lists a package and finds its mutants.
func load(ctx context.Context, pattern string, flags []string) (*Package, error) {
	out, err := output(exec.CommandContext(ctx, "go", append(append([]string{"list"}, flags...), "-json=ImportPath,Dir,GoFiles,CgoFiles", pattern)...))
	if err != nil {
		return nil, err
	}
	var is struct {
		ImportPath, Dir   string
		GoFiles, CgoFiles []string
	}
	if err := json.Unmarshal(out, &is); err != nil {
		return nil, fmt.Errorf("list %s: %w (name one package at a time)", pattern, err)
	}
	p := &Package{Path: is.ImportPath, Dir: is.Dir, Files: append(is.GoFiles, is.CgoFiles...), flags: flags}
	for _, name := range p.Files {
		path := filepath.Join(p.Dir, name)
		src, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		found, err := findMutants(path, src)
		if err != nil {
			return nil, err
		}
		p.Mutants = append(p.Mutants, found...)
	}
	return p, nil
}

// build compiles the package's tests. It writes nothing but the binary.
func (p *Package) build(ctx context.Context, binary string, extra ...string) error {
	args := append(append([]string{"test", "-c", "-vet=off", "-o", binary}, p.flags...), extra...)
	_, err := output(exec.CommandContext(ctx, "go", append(args, p.Path)...))
	return err
}

// measure runs the unchanged tests twice: to find the lines that they cover, and to measure
// their time. The tests must pass.
func (p *Package) measure(ctx context.Context, dir string) error {
	binary, profile := filepath.Join(dir, "cover.test"), filepath.Join(dir, "cover.out")
	if err := p.build(ctx, binary, "-cover"); err != nil {
		return err
	}
	if out, err := p.run(ctx, binary, dir, time.Hour, "-test.coverprofile="+profile); err != nil {
		return fmt.Errorf("run the tests of %s with coverage: %w\n%s", p.Path, err, out)
	}
	text, err := os.ReadFile(profile)
	if err != nil {
		return err
	}
	// Add the coverage of child processes that the tests started from the test binary.
	if children, err := filepath.Glob(filepath.Join(dir, "covmeta.*")); err == nil && len(children) > 0 {
		if _, err := output(exec.CommandContext(ctx, "go", "tool", "covdata", "textfmt", "-i="+dir, "-o="+profile)); err != nil {
			return err
		}
		more, err := os.ReadFile(profile)
		if err != nil {
			return err
		}
		text = append(text, more...)
	}
	if err := p.cover(text); err != nil {
		return err
	}
	if err := p.build(ctx, binary); err != nil {
		return err
	}
	began := time.Now()
	if out, err := p.run(ctx, binary, dir, time.Hour); err != nil {
		return fmt.Errorf("run the tests of %s: %w\n%s", p.Path, err, out)
	}
	p.baseline = time.Since(began)
	return nil
}

// cover marks the mutants that the tests reach according to a cover profile.
func (p *Package) cover(profile []byte) error {
	type place struct{ line, col int }
	before := func(a, b place) bool { return a.line < b.line || a.line == b.line && a.col < b.col }
	inBlock, reached := map[*Mutant]bool{}, map[string]bool{}
	in := bufio.NewScanner(bytes.NewReader(profile))
	for in.Scan() {
		file, rest, _ := strings.Cut(in.Text(), ":")
		if file == "mode" {
			continue
		}
		var from, to place
		var statements, count int
		if _, err := fmt.Sscanf(rest, "%d.%d,%d.%d %d %d", &from.line, &from.col, &to.line, &to.col, &statements, &count); err != nil {
			return fmt.Errorf("read the cover profile, line %q: %w", in.Text(), err)
		}
		for _, m := range p.Mutants {
			at := place{m.Line, m.col}
			if filepath.Base(m.File) != filepath.Base(file) || before(at, from) || !before(at, to) {
				continue
			}
			inBlock[m] = true
			if count > 0 {
				m.covered, reached[m.Func] = true, true
			}
		}
	}
	// The profile has no block for the conditions of a switch, or for code after a function
	// literal.
	for _, m := range p.Mutants {
		m.covered = m.covered || !inBlock[m] && reached[m.Func]
	}
	return in.Err()
}

// output runs a command of the toolchain. Its error includes the command's output.
func output(cmd *exec.Cmd) ([]byte, error) {
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w\n%s%s", strings.Join(cmd.Args, " "), err, stderr.Bytes(), out)
	}
	return out, nil
}
