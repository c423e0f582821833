// Command mutate measures how many faults the tests detect. It changes one line of a
// package, runs the package's unit tests, and reports the changes that the tests miss.
//
// It never writes to the source tree. It changes only lines that the tests reach, and
// counts the mutants of other lines as unreached. A sample depends only on its seed and on
// the code of each function. Surviving mutants that are equivalent to the original are
// listed in equivalent.txt, each with its reason.
package main

import (
	"bytes"
	"cmp"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"text/tabwriter"
)

// Options configure a measurement.
type Options struct {
	Packages   []string // directories relative to the module's root
	Count      int      // mutants per package; 0 means all
	Seed       string
	Jobs       int
	Min        float64 // the minimum share of detected mutants to pass
	Only       string  // a part of the keys to try; "" means all
	Tags       string
	Equivalent string // path of the list of equivalent mutants
	Unreached  bool   // also list the unreached mutants
	List       bool   // list the mutants without running anything
}

func main() {
	var o Options
	flag.IntVar(&o.Count, "n", 40, "`mutants` of each package; 0 is all")
	flag.StringVar(&o.Seed, "seed", "1", "another `seed` is another sample")
	flag.IntVar(&o.Jobs, "j", 2, "mutants at a `time`")
	flag.Float64Var(&o.Min, "min", 0.9, "`share` of noticed mutants below which the exit code is 1")
	flag.StringVar(&o.Only, "only", "", "try only mutants with this `text` in their key")
	flag.StringVar(&o.Tags, "tags", "", "build `tags`")
	flag.StringVar(&o.Equivalent, "equivalent", "test/mutate/equivalent.txt", "`file` of the mutants that no test can notice")
	flag.BoolVar(&o.Unreached, "unreached", false, "list the mutants in lines that no test reaches")
	flag.BoolVar(&o.List, "list", false, "list the mutants, try none")
	flag.Parse()
	o.Packages = flag.Args()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	passed, err := run(ctx, o, os.Stdout)
	stop()
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(2)
	case !passed:
		os.Exit(1)
	}
}

// result counts the outcomes of a package's mutants.
type result struct {
	name       string
	counts     map[Verdict]int
	unreached  int
	equivalent int
}

// share returns the share of the compiling mutants that were detected.
func (r result) share() float64 {
	noticed := r.counts[Killed] + r.counts[Timeout]
	if all := noticed + r.counts[Survived]; all > 0 {
		return float64(noticed) / float64(all)
	}
	return 1
}

// run measures each package, and reports whether all reach the minimum.
func run(ctx context.Context, o Options, w io.Writer) (passed bool, err error) {
	list := map[string]map[string]bool{}
	if f, err := os.Open(o.Equivalent); err == nil {
		defer f.Close()
		if list, err = readEquivalent(f); err != nil {
			return false, fmt.Errorf("read %s: %w", o.Equivalent, err)
		}
	} else if !os.IsNotExist(err) {
		return false, err
	}
	var flags []string
	if o.Tags != "" {
		flags = []string{"-tags=" + o.Tags}
	}
	passed = true
	var results []result
	for _, name := range o.Packages {
		p, err := load(ctx, "./"+name, flags)
		if err != nil {
			return false, err
		}
		r, err := o.measure(ctx, p, name, list[name], w)
		if err != nil {
			return false, err
		}
		results = append(results, r)
		passed = passed && r.share() >= o.Min
	}
	if !o.List {
		table(w, results)
	}
	return passed, nil
}

// measure tries a sample of a package's mutants, and prints the survivors.
func (o Options) measure(ctx context.Context, p *Package, name string, equivalent map[string]bool, w io.Writer) (result, error) {
	r := result{name: name, counts: map[Verdict]int{}, equivalent: len(equivalent)}
	known := map[string]bool{}
	for _, m := range p.Mutants {
		known[m.Key()] = true
	}
	for key := range equivalent {
		if !known[key] {
			return r, fmt.Errorf("%s lists a mutant that %s does not have: %s", o.Equivalent, name, key)
		}
	}
	if o.List {
		for _, m := range p.Mutants {
			fmt.Fprintf(w, "%s %s\n", name, m.Key())
		}
		return r, nil
	}
	dir, err := os.MkdirTemp("", "mutate")
	if err != nil {
		return r, err
	}
	defer os.RemoveAll(dir)
	if err := p.measure(ctx, dir); err != nil {
		return r, err
	}
	fmt.Fprintf(w, "# %s: %d mutants, the tests take %.1fs\n", name, len(p.Mutants), p.baseline.Seconds())
	var candidates []*Mutant
	for _, m := range p.Mutants {
		switch {
		case equivalent[m.Key()] || !strings.Contains(m.Key(), o.Only):
		case m.covered:
			candidates = append(candidates, m)
		default:
			r.unreached++
			if o.Unreached {
				fmt.Fprintf(w, "unreached %s\n", place(m, p, name))
			}
		}
	}
	slices.SortFunc(candidates, func(a, b *Mutant) int {
		return cmp.Compare(a.rank(o.Seed, name), b.rank(o.Seed, name))
	})
	return r, o.tryAll(ctx, p, candidates, &r, w)
}

// tryAll tries mutants until Count of them have compiled.
func (o Options) tryAll(ctx context.Context, p *Package, candidates []*Mutant, r *result, w io.Writer) error {
	var mu sync.Mutex // guards everything below
	var failed error
	next, running := 0, 0
	turn := sync.NewCond(&mu)
	var jobs sync.WaitGroup
	for range max(o.Jobs, 1) {
		jobs.Go(func() {
			mu.Lock()
			defer mu.Unlock()
			for {
				tried := r.counts[Killed] + r.counts[Timeout] + r.counts[Survived]
				if failed != nil || next == len(candidates) || o.Count > 0 && tried >= o.Count {
					return
				}
				if o.Count > 0 && tried+running >= o.Count { // one of the running mutants may not compile
					turn.Wait()
					continue
				}
				m := candidates[next]
				next++
				running++
				mu.Unlock()
				verdict, err := p.try(ctx, m)
				mu.Lock()
				running--
				turn.Broadcast()
				if err != nil {
					failed = err
					return
				}
				r.counts[verdict]++
				switch verdict {
				case Survived:
					fmt.Fprintf(w, "%s %s\n%s", verdict, place(m, p, r.name), m.diff())
				case Timeout:
					fmt.Fprintf(w, "%s %s\n", verdict, place(m, p, r.name))
				}
			}
		})
	}
	jobs.Wait()
	return failed
}

// place formats the location of a mutant, and its key as in equivalent.txt.
func place(m *Mutant, p *Package, name string) string {
	file, err := filepath.Rel(p.Dir, m.File)
	if err != nil {
		file = m.File
	}
	return fmt.Sprintf("%s/%s:%d\n  %s %s", name, file, m.Line, name, m.Key())
}

// diff formats the lines that a mutant changes.
func (m *Mutant) diff() string {
	src, err := os.ReadFile(m.File)
	if err != nil {
		return err.Error() + "\n"
	}
	from := bytes.LastIndexByte(src[:m.start], '\n') + 1
	to := len(src)
	if i := bytes.IndexByte(src[m.end:], '\n'); i >= 0 {
		to = m.end + i
	}
	var b strings.Builder
	lines := func(sign, text string) {
		for line := range strings.Lines(text) {
			fmt.Fprintf(&b, "  %s %s\n", sign, strings.TrimSuffix(line, "\n"))
		}
	}
	lines("-", string(src[from:to]))
	lines("+", string(src[from:m.start])+m.with+string(src[m.end:to]))
	return b.String()
}

func table(w io.Writer, results []result) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "package\tkilled\ttimeout\tsurvived\tnoticed\tinvalid\tequivalent\tunreached\t")
	for _, r := range results {
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%.0f%%\t%d\t%d\t%d\t\n", r.name, r.counts[Killed], r.counts[Timeout], r.counts[Survived],
			100*r.share(), r.counts[Invalid], r.equivalent, r.unreached)
	}
	_ = t.Flush() // writes to standard output
}
